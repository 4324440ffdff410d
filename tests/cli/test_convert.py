"""`octavo convert`: what it saves can be served, and it says what was lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine
from tests.models.tiny_gguf import make_tiny_gguf


def test_a_directory(tiny_model: Path, tmp_path: Path, command_line: CommandLine) -> None:
    output = tmp_path / "pooled"
    ended = command_line("convert", tiny_model, "--kv-heads", "1", "-o", output)
    assert ended.code == 0, ended.err
    assert re.search(r"KV heads +2 +1\n", ended.out)
    assert re.search(r"KV bytes per token \(bf16\) +384 +192\n", ended.out)
    nats = re.search(r"nats per token +(\d+\.\d+) +(\d+\.\d+)\n", ended.out)
    assert nats is not None
    lost = re.search(r"tokens: ([+-]\d+\.\d+) nats per token", ended.out)
    assert lost is not None
    assert float(lost[1]) == pytest.approx(float(nats[2]) - float(nats[1]), abs=2e-4)
    assert "has not been trained" in ended.out
    assert command_line("generate", output, "-p", "The quick", "--max-tokens", "3").code == 0


def test_a_gguf_file_gets_its_tokenizer(tmp_path: Path, command_line: CommandLine) -> None:
    make_tiny_gguf(tmp_path / "tiny.gguf", "qwen2", "Q8_0")
    output, text = tmp_path / "pooled", tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 9)
    ended = command_line("convert", tmp_path / "tiny.gguf", "--kv-heads", "4", "-o", output, "--text", text)
    assert ended.code == 0, ended.err
    from octavo.engine.tokenizer import Tokenizer
    from octavo.models.loader import open_model

    metadata = open_model(tmp_path / "tiny.gguf").tokenizer_source.gguf_metadata
    assert metadata is not None
    saved, original = Tokenizer.from_directory(output), Tokenizer.from_gguf_metadata(metadata)
    for line in ("The quick brown fox", "<|im_start|>user\n4,096 🙂 été", ""):
        assert saved.encode(line) == original.encode(line)
    assert open_model(output).generation.eos_token_ids == (2, 0)
    assert open_model(output).generation.chat_template is not None
    asked = ("--chat", "-p", "Hello", "--max-tokens", "3")
    assert command_line("generate", output, *asked).code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kv-heads", "2"), "--kv-heads is 2 and the model has 2 KV heads; choose one of 1"),
        (("--kv-heads", "0"), "0 is not in the range"),
        ((), "Missing option '--kv-heads'"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: tuple[str, ...], words: str, tiny_model: Path, tmp_path: Path, command_line: CommandLine
) -> None:
    ended = command_line("convert", tiny_model, *arguments, "-o", tmp_path / "pooled")
    assert ended.code in (1, 2)
    assert words in ended.err
    assert not (tmp_path / "pooled").exists()


def test_a_folder_that_is_not_empty(tiny_model: Path, command_line: CommandLine) -> None:
    ended = command_line("convert", tiny_model, "--kv-heads", "1", "-o", tiny_model)
    assert (ended.code, ended.out) == (1, "")
    assert "is not empty; give a new or an empty folder" in ended.err
