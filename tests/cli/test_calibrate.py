"""`octavo calibrate`, and what a cache in fp8 says of its scales on every way in."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from octavo.cli.sample_text import SAMPLE_TEXT
from tests.cli.conftest import CommandLine
from tests.cli.test_serve import ask, serving, url_of
from tests.models.tiny_models import make_tiny_model

FP8 = ("--kv-cache-dtype", "fp8_e4m3")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of its own: scales are written beside it."""
    return make_tiny_model(tmp_path / "model")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(SAMPLE_TEXT)
    return path


def test_refused_without_scales_then_calibrated_then_used(command_line: CommandLine, model: Path, text: Path) -> None:
    generate = ("generate", model, "-p", "The river", "--max-tokens", "4", "--seed", "1", "--ignore-eos", "--json")
    refused = command_line(*generate, *FP8)
    assert refused.code == 1
    assert "octavo calibrate MODEL --text FILE --format fp8_e4m3" in refused.err
    assert "--kv-cache-scales none" in refused.err
    by_name = command_line(*generate, *FP8, "--kv-cache-scales", "none")
    assert by_name.code == 0, by_name.err
    made = command_line("calibrate", model, "--threads", "1", "--text", text, "--tokens", "200", "--scheme", "channel")
    assert made.code == 0, made.err
    assert "calibrated fp8_e4m3 by channel on 200 tokens: 3 layers" in made.out
    assert (model / "kv-scales.fp8_e4m3.safetensors").exists()
    used = command_line(*generate, *FP8)
    assert used.code == 0, used.err
    assert json.loads(used.out)["usage"]["completion_tokens"] == 4
    other_format = command_line(*generate, "--kv-cache-dtype", "fp8_e5m2")
    assert "--format fp8_e5m2" in other_format.err


def test_a_server_says_which_scales_it_uses(command_line: CommandLine, model: Path, text: Path) -> None:
    packed = text.with_suffix(".gz")
    packed.write_bytes(gzip.compress(text.read_bytes()))
    elsewhere = text.with_suffix(".scales")
    assert command_line("calibrate", model, "--threads", "1", "--text", packed, "--output", elsewhere).code == 0
    with serving(model, *FP8, "--kv-cache-scales", str(elsewhere)) as (_, lines):
        assert "KV cache fp8_e4m3 with the scales of text.scales (by hadamard, digest " in lines[0]
        status = ask(f"{url_of(lines)}/v1/kv/status")
        assert status["kv_cache_dtype"] == "fp8_e4m3"
        scales = status["kv_scales"]
        assert (scales["file"], scales["scheme"], len(scales["digest"])) == ("text.scales", "hadamard", 64)
        assert not any("calibrated" in line for line in status["degraded"])
    with serving(model, *FP8, "--kv-cache-scales", "none") as (_, lines):
        assert "KV cache fp8_e4m3, uncalibrated, " in lines[0]
        status = ask(f"{url_of(lines)}/v1/kv/status")
        assert status["kv_scales"] == "none"
        assert any("fp8_e4m3 is not calibrated" in line for line in status["degraded"])


def test_scales_of_another_model_and_stale_ones_are_refused(
    command_line: CommandLine, model: Path, text: Path, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", "qwen2")
    assert command_line("calibrate", other, "--threads", "1", "--text", text).code == 0
    foreign = other / "kv-scales.fp8_e4m3.safetensors"
    refused = command_line("generate", model, "-p", "x", *FP8, "--kv-cache-scales", foreign)
    assert refused.code == 1
    assert f"{foreign} has scales of another model" in refused.err
    foreign.rename(model / foreign.name)
    stale = command_line("generate", model, "-p", "x", *FP8)
    assert "has scales of another model" in stale.err


def test_wrong_asks(command_line: CommandLine, model: Path, text: Path, tmp_path: Path) -> None:
    assert command_line("calibrate", model).code == 2
    assert command_line("calibrate", model, "--threads", "1", "--text", text, "--format", "k8v4").code == 2
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00\x9f" * 10)
    assert "is not UTF-8 text" in command_line("calibrate", model, "--threads", "1", "--text", binary).err
    broken = tmp_path / "broken.gz"
    broken.write_bytes(gzip.compress(b"a text " * 100)[:20])
    assert "cannot be read" in command_line("calibrate", model, "--threads", "1", "--text", broken).err
    empty = tmp_path / "empty"
    empty.write_text("")
    assert "has 0 tokens" in command_line("calibrate", model, "--threads", "1", "--text", empty).err
    nowhere = command_line("calibrate", model, "--threads", "1", "--text", text, "--output", tmp_path / "no" / "where")
    assert "cannot be written" in nowhere.err
