"""`octavo models` and `octavo pull`: what is here, what is damaged, where it is kept. Nothing is fetched."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import environment
from octavo.cli.model_cache import cache_dir
from octavo.cli.progress import progress_bar
from octavo.errors import DownloadError
from octavo.models import hub
from octavo.models.aliases import ALIASES, SMOLLM2
from tests.cli.conftest import CommandLine


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(environment.CACHE_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def damaged_file(cache: Path) -> Path:
    file = cache / "models" / SMOLLM2.name / SMOLLM2.file_name
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF")
    return file


def test_aliases_are_listed_with_size_and_licence(cache: Path, command_line: CommandLine) -> None:
    ended = command_line("models")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert len(lines) == len(ALIASES) + 1
    for alias, line in zip(ALIASES, lines, strict=False):
        assert line.startswith(f"{alias.name} ")
        assert "to be fetched" in line
        assert alias.licence in line
    assert lines[-1] == f"kept in {cache}"


def test_json_has_one_object_a_model(cache: Path, damaged_file: Path, command_line: CommandLine) -> None:
    found: dict[str, dict[str, Any]] = {
        entry["name"]: entry for entry in json.loads(command_line("models", "--json").out)
    }
    assert set(found) == {alias.name for alias in ALIASES}
    assert found["smollm2"]["path"] == str(damaged_file)
    assert found["smollm2"]["state"] == "in part"
    assert found["smollm2"]["sha256"] == SMOLLM2.sha256
    assert found["gemma3-270m"]["state"] == "to be fetched"
    assert found["gemma3-270m"]["path"] is None


def test_verify_finds_a_damaged_file_and_says_what_to_do(
    cache: Path, damaged_file: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = command_line("models", "--verify")
    assert ended.code == 1
    assert "smollm2 is damaged; `octavo pull smollm2` fetches it again" in ended.out
    monkeypatch.setattr(hub, "verify", lambda alias, folder, progress: folder == cache and alias is SMOLLM2)
    ended = command_line("models", "--verify")
    assert ended.code == 0
    assert "verified" in ended.out
    assert "is damaged" not in ended.out


def test_pull_prints_where_the_model_is(
    cache: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def pull(reference: str, *, cache_dir: Path, progress: object) -> Path:
        asked.append((reference, cache_dir, progress))
        return cache_dir / "file"

    monkeypatch.setattr(hub, "pull", pull)
    ended = command_line("pull", "smollm2")
    assert (ended.code, ended.out) == (0, f"{cache / 'file'}\n")
    assert asked == [("smollm2", cache, None)]  # no progress where standard error is no terminal


def test_pull_says_of_what_it_fetched_that_it_cannot_be_run(
    cache: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.models.aliases.SUPPORTED_ARCHITECTURES", ("LlamaForCausalLM",))
    monkeypatch.setattr(hub, "pull", lambda reference, *, cache_dir, progress: cache_dir / reference)
    ended = command_line("pull", "gemma3-270m")
    assert (ended.code, ended.out) == (0, f"{cache / 'gemma3-270m'}\n")
    assert ended.err.startswith("octavo: gemma3-270m cannot be run: architecture 'Gemma3ForCausalLM'")


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("chat",), ("generate", "-p", "x")], ids=lambda c: c[0])
def test_what_cannot_be_run_is_not_fetched(
    command: tuple[str, ...], cache: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.models.aliases.SUPPORTED_ARCHITECTURES", ("LlamaForCausalLM",))
    monkeypatch.setattr(hub, "resolve", lambda *_, **__: pytest.fail("fetched"))
    ended = command_line(*command, "gemma3-270m")
    assert ended.code == 1
    assert ended.err.startswith("octavo: gemma3-270m cannot be run: architecture 'Gemma3ForCausalLM'")


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("OCTAVO_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "octavo"
    for nothing in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", nothing)
        assert cache_dir() == Path.home() / ".cache" / "octavo"


def test_a_failed_pull_is_one_sentence(cache: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(reference: str, *, cache_dir: Path, progress: object) -> Path:
        raise DownloadError(f"{reference} could not be fetched; check the network")

    monkeypatch.setattr(hub, "pull", pull)
    ended = command_line("pull", "smollm2")
    assert (ended.code, ended.err) == (1, "octavo: smollm2 could not be fetched; check the network\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_on_a_terminal_once_there_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress_bar("fetching it") as progress:
        assert progress is not None
        assert terminal.getvalue() == ""
        progress(5, 10)
        progress(10, 10)
    assert "fetching it" in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    with progress_bar("fetching it") as progress:
        assert progress is None
    assert log.getvalue() == ""
