"""Models that cannot be loaded: one sentence that names the file and the cure, exit code 1, nothing left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine
from tests.models.tiny_models import make_tiny_model

Damage = Callable[[Path], Path]  # a good model directory -> the reference to give


@pytest.fixture(scope="session")
def sharded_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("sharded") / "model", num_shards=3)


def edit_config(model: Path, **fields: object) -> Path:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return model


def cut_shard(model: Path) -> Path:
    shard = model / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    return model


def lose_shard(model: Path) -> Path:
    (model / "model-00002-of-00003.safetensors").unlink()
    return model


def break_config(model: Path) -> Path:
    (model / "config.json").write_text("{")
    return model


def lose_tokenizer(model: Path) -> Path:
    (model / "tokenizer.json").unlink()
    return model


def no_gguf(model: Path) -> Path:
    (model / "model.gguf").write_bytes(b"GGUF" + b"\x03\0\0\0" + b"\xff" * 16)
    return model / "model.gguf"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda model: Path("no-such-alias"), ["no-such-alias", "smollm2"]),
        (lambda model: model / "nothing", ["nothing"]),
        (lambda model: model / "tokenizer.json", ["tokenizer.json", ".gguf"]),
        (cut_shard, ["model-00002-of-00003.safetensors"]),
        (lose_shard, ["model-00002-of-00003.safetensors"]),
        (break_config, ["config.json"]),
        (lose_tokenizer, ["tokenizer"]),
        (no_gguf, ["model.gguf"]),
        (lambda model: edit_config(model, architectures=["BambooForCausalLM"]), ["BambooForCausalLM", "LlamaFor"]),
        (lambda model: edit_config(model, hidden_size=128), ["model.embed_tokens.weight", "128", "64"]),
        (lambda model: edit_config(model, quantization_config={"quant_method": "awq"}), ["awq"]),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_loaded_is_one_sentence(
    damage: Damage, words: list[str], sharded_model: Path, tmp_path: Path, command_line: CommandLine
) -> None:
    model = damage(shutil.copytree(sharded_model, tmp_path / "model"))
    before = sorted(tmp_path.rglob("*"))
    for command in (("serve", model, "--port", "0"), ("generate", model, "-p", "x"), ("chat", model)):
        ended = command_line(*command)
        assert ended.code == 1, ended
        assert ended.out == ""
        assert ended.err.startswith("octavo: ")
        assert len(ended.err.splitlines()) == 1, ended.err
        for word in words:
            assert word in ended.err, (word, ended.err)
    assert sorted(tmp_path.rglob("*")) == before
