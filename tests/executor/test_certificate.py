"""Certificates: the newest that holds is found; whatever is damaged, foreign or stale is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.executor.certificate import (
    FILE_KIND,
    CertifiedSetting,
    certificate_name,
    digest_of,
    folders,
    read_certificate,
    write_certificate,
)
from octavo.executor.config import ExecutorConfig
from octavo.executor.kv_scales import default_scales_path, write_scales
from octavo.executor.kv_setting import Running, kv_setting, setting_numerics
from octavo.kernels.native import NativeOps
from tests.executor.test_kv_scales import MODEL, make_scales

CURE = "make one with `octavo certify MODEL --text FILE`"
CERTIFIED = ExecutorConfig(kv_cache_dtype="certified")


class Model:
    digest = MODEL
    stored_dtype = "bf16"

    def __init__(self, path: Path) -> None:
        self.path = path


@pytest.fixture
def model(tmp_path: Path) -> Model:
    (tmp_path / "model").mkdir()
    return Model(tmp_path / "model")


@pytest.fixture
def running(tmp_path: Path) -> Running:
    return Running(NativeOps(1), "int8", None, tmp_path / "cache")


def report(running: Running, kv_format: str = "int8", skipped: tuple[int, ...] = (), **changes: Any) -> dict[str, Any]:
    digest = make_scales().digest if kv_format == "fp8_e4m3" else None
    setting = CertifiedSetting(kv_format, skipped, digest, "", "")
    return {
        "kind": FILE_KIND,
        "model_digest": MODEL,
        "weights_dtype": running.weights_dtype,
        "instruction_set": running.ops.instruction_set,  # type: ignore[attr-defined]
        "max_model_len": 1000,
        "text_digest": "b" * 64,
        "created": "2026-01-01T00:00:00+00:00",
        "max_kl": 0.02,
        "min_top1": 0.97,
        "chosen": kv_format,
        "setting": {
            "kv_cache_dtype": kv_format,
            "skip_layers": list(skipped),
            "scales_digest": digest,
            "numerics": setting_numerics(running.ops, running.weights_dtype, setting, "bf16"),
        },
        **changes,
    }


def write_beside(model: Model, one: dict[str, Any]) -> Path:
    path = model.path / certificate_name(one)
    write_certificate(path, one)
    return path


def test_the_newest_that_matches_is_used_and_said(model: Model, running: Running) -> None:
    write_beside(model, report(running, "k8v4", created="2026-02-01T00:00:00+00:00", weights_dtype="bf16"))
    path = write_beside(
        model, report(running, "int8", (1, 2), text_digest="c" * 64, created="2026-01-03T00:00:00+00:00")
    )
    write_beside(model, report(running, "bf16", text_digest="d" * 64, created="2026-01-02T00:00:00+00:00"))
    found = kv_setting(CERTIFIED, model, running)
    assert (found.kv_format, found.skip_layers) == ("int8", (1, 2))
    config = found.config(CERTIFIED)
    assert (config.kv_cache_dtype, config.kv_cache_skip_layers) == ("int8", (1, 2))
    assert f"certified by {path.name}" in found.words()
    told = found.as_object()["certificate"]
    assert isinstance(told, dict)
    assert (told["file"], told["max_model_len"]) == (path.name, 1000)
    (by_name,) = [kv_setting(replace(CERTIFIED, certificate=str(path)), model, running)]
    assert by_name.certificate == found.certificate


def test_an_older_one_does_not_speak_against_the_newest(model: Model, running: Running) -> None:
    older = write_beside(model, report(running, text_digest="c" * 64))
    nothing = {"setting": None, "chosen": None, "created": "2026-01-02T00:00:00+00:00"}
    newest = write_beside(model, report(running, **nothing))
    with pytest.raises(ConfigError, match="found no setting within its limits") as caught:
        kv_setting(CERTIFIED, model, running)
    assert str(newest) in str(caught.value)
    assert kv_setting(replace(CERTIFIED, certificate=str(older)), model, running).kv_format == "int8"


def test_it_holds_up_to_the_length_that_was_measured(model: Model, running: Running) -> None:
    write_beside(model, report(running))
    found = kv_setting(CERTIFIED, model, running)
    assert found.longest_context(8192) == 1000
    assert found.longest_context(512) == 512
    (told,) = found.degraded(8192, None)
    assert told.startswith("max_model_len is at most 1000 instead of the model's 8192")
    assert found.degraded(512, None) == found.degraded(8192, 600) == ()
    assert kv_setting(CERTIFIED, model, replace(running, max_model_len=1000)).kv_format == "int8"
    with pytest.raises(ConfigError, match=r"measured up to 1000 tokens, and --max-model-len is 1001"):
        kv_setting(CERTIFIED, model, replace(running, max_model_len=1001))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_digest": "c" * 64}, r"is of another model \(digest cccccccccccc, and this one's is aaaaaaaaaaaa\)"),
        ({"weights_dtype": "f32"}, "is for weights in f32, and these are in int8"),
        ({"setting": None, "chosen": None}, r"found no setting within its limits \(KL 0.02, top-1 0.97\)"),
    ],
)
def test_one_that_is_foreign_or_stale_is_refused_by_name(
    model: Model, running: Running, changes: dict[str, Any], message: str
) -> None:
    path = write_beside(model, report(running, **changes))
    for config in (CERTIFIED, replace(CERTIFIED, certificate=str(path))):
        with pytest.raises(ConfigError, match=message) as caught:
            kv_setting(config, model, running)
        assert str(path) in str(caught.value)
        assert CURE in str(caught.value)


def test_other_kernels_make_it_stale(model: Model, running: Running) -> None:
    one = report(running)
    one["setting"]["numerics"] = "0" * 64
    write_beside(model, one)
    with pytest.raises(ConfigError, match="other kernels or another --instruction-set"):
        kv_setting(CERTIFIED, model, running)


def test_none_is_refused_with_the_places_that_were_looked_at(model: Model, running: Running) -> None:
    with pytest.raises(ConfigError, match=CURE) as caught:
        kv_setting(CERTIFIED, model, running)
    assert str(model.path) in str(caught.value)
    assert str(running.cache_dir) in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        kv_setting(replace(CERTIFIED, certificate=str(model.path / "none")), model, running)


def test_the_cache_directory_is_looked_at_too_and_files_know_their_model(model: Model, running: Running) -> None:
    one = report(running)
    folder, start = folders(model.path, running.cache_dir)[1]
    write_certificate(folder / f"{start}{certificate_name(one)}", one)
    assert kv_setting(CERTIFIED, model, running).kv_format == "int8"
    file = Model(model.path / "m[1].gguf")
    file.path.touch()
    beside, start = folders(file.path, running.cache_dir)[0]
    assert (beside, start) == (model.path, "m[1].gguf.")
    write_certificate(beside / f"{start}{certificate_name(one)}", report(running, "bf16"))
    assert kv_setting(CERTIFIED, file, running).kv_format == "bf16"


def test_its_scales_must_be_there_and_be_the_same(model: Model, running: Running) -> None:
    write_beside(model, report(running, "fp8_e4m3"))
    with pytest.raises(ConfigError, match="wants calibrated scales"):
        kv_setting(CERTIFIED, model, running)
    path = default_scales_path(model.path, "fp8_e4m3")
    write_scales(path, make_scales(seed=1))
    with pytest.raises(ConfigError, match=r"is for scales of digest \w{12}, and those that were found have \w{12}"):
        kv_setting(CERTIFIED, model, running)
    with pytest.raises(ConfigError, match="those that were found have none"):
        kv_setting(replace(CERTIFIED, kv_cache_scales="none"), model, running)
    write_scales(path, make_scales())
    found = kv_setting(CERTIFIED, model, running)
    assert found.scales is not None
    assert found.scales.digest == make_scales().digest


def test_flags_that_do_not_go_together(model: Model, running: Running) -> None:
    write_beside(model, report(running))
    with pytest.raises(ConfigError, match="goes with --kv-cache-dtype certified"):
        kv_setting(ExecutorConfig(certificate="x"), model, running)
    with pytest.raises(ConfigError, match="a certificate brings its own layers"):
        kv_setting(replace(CERTIFIED, kv_cache_skip_layers=(1,)), model, running)
    assert kv_setting(replace(CERTIFIED, kv_cache_scales="none"), model, running).scales is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no JSON"),
        ("[1]", "does not say that it is"),
        ('{"kind": "something"}', "does not say that it is"),
        ("[" * 100_000, "no JSON"),
        ("\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "no JSON"),
    ],
)
def test_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "certificate"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message) as caught:
        read_certificate(path)
    assert str(path) in str(caught.value)
    assert CURE in str(caught.value)


def test_every_change_of_the_content_is_refused(model: Model, running: Running) -> None:
    path = write_beside(model, report(running))
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x01]) + whole[place + 1 :])
        with pytest.raises(ConfigError, match=CURE):
            read_certificate(path)
    for length in range(0, len(whole) - 2, 11):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=CURE):
            read_certificate(path)
    for key in ("setting", "max_model_len", "created"):
        damaged = {name: value for name, value in json.loads(whole).items() if name != key}
        damaged["digest"] = digest_of(damaged)
        path.write_text(json.dumps(damaged))
        with pytest.raises(ConfigError, match="a field is missing"):
            read_certificate(path)
    unknown = json.loads(whole)
    unknown["setting"]["kv_cache_dtype"] = "int3"
    write_certificate(path, unknown)
    with pytest.raises(ConfigError, match="'int3' is not known"):
        read_certificate(path)
