"""Opening and loading whole models: what is refused and how, the digest, the defaults, progress and memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import ConfigError, MemoryBudgetError, ModelError
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32, PackedLinear
from octavo.kernels.reference import ReferenceLinear, ReferenceOps
from octavo.models.loader import load_model, open_model
from octavo.models.packed_size import resolve_weights_dtype
from tests.models.tiny_gguf import make_tiny_gguf
from tests.models.tiny_models import (
    CHAT_TEMPLATE,
    make_tiny_model,
    tiny_config,
    tiny_weights,
    write_safetensors,
    write_shards,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", "llama2")


def rewrite(directory: Path, file_name: str, **fields: Any) -> None:
    path = directory / file_name
    said = json.loads(path.read_text()) if path.exists() else {}
    said.update(fields)
    path.write_text(json.dumps(said))


def rewrite_weights(directory: Path, changes: dict[str, F32 | None]) -> None:
    weights: dict[str, Any] = tiny_weights(tiny_config("llama2"))
    weights.update(changes)
    kept = {name: values for name, values in weights.items() if values is not None}
    write_safetensors(directory / "model.safetensors", kept, "f32")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no model at .*nothing; give a model directory or a \.gguf file"):
        open_model(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"neither a config\.json nor a \.gguf file"):
        open_model(tmp_path)


def test_a_directory_with_one_gguf_file(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "a.gguf", "qwen2", "Q8_0")
    assert open_model(tmp_path).path == tmp_path / "a.gguf"
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    with pytest.raises(ModelError, match=r"2 GGUF files; give one of them: .*a\.gguf"):
        open_model(tmp_path)


def test_a_config_beside_a_gguf_file(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "a.gguf", "qwen2", "Q8_0")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert open_model(tmp_path).path == tmp_path / "a.gguf"


def test_a_single_file_goes_before_an_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"x": "gone.safetensors"}}')
    assert open_model(directory).config.num_layers == 3


@pytest.mark.parametrize("ending", ["bin", "pt", "pth", "ckpt"])
def test_pickles_are_refused(ending: str, directory: Path) -> None:
    pickle = directory / f"pytorch_model.{ending}"
    (directory / "model.safetensors").rename(pickle)
    for path in (directory, pickle):
        with pytest.raises(ModelError, match=rf"pytorch_model\.{ending} is a pickle file.*convert it"):
            open_model(path)


def test_a_lone_weight_file(directory: Path) -> None:
    with pytest.raises(ModelError, match="give the directory"):
        open_model(directory / "model.safetensors")


def test_no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        open_model(directory)


def test_an_unknown_architecture_is_told_before_missing_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    rewrite(directory, "config.json", architectures=["MambaForCausalLM"])
    with pytest.raises(ModelError, match="'MambaForCausalLM' is not supported"):
        open_model(directory)


def test_lora_adapters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="LoRA adapter, which is not supported yet; merge it"):
        open_model(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"a": 1, "a": 2}', "\xff"])
def test_a_broken_config(text: str, directory: Path) -> None:
    (directory / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        open_model(directory)


def test_a_missing_tensor_is_named(directory: Path) -> None:
    rewrite_weights(directory, {"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight' \[96, 64\]; it is in"):
        open_model(directory)


def test_an_untied_model_without_head(directory: Path) -> None:
    rewrite_weights(directory, {"lm_head.weight": None})
    with pytest.raises(ModelError, match=r"no tensor 'lm_head\.weight'"):
        open_model(directory)


def test_a_shape_that_contradicts_the_config(directory: Path) -> None:
    rewrite(directory, "config.json", num_key_value_heads=4)
    with pytest.raises(ModelError, match=r"k_proj\.weight' has the shape \[32, 64\] where .* asks for \[64, 64\]"):
        open_model(directory)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj.weight", "extra"])
def test_a_tensor_that_would_be_left_out(name: str, directory: Path) -> None:
    rewrite_weights(directory, {name: np.zeros((4, 4), np.float32)})
    with pytest.raises(ModelError, match=f"'{name}' belongs to no part of a LlamaForCausalLM"):
        open_model(directory)


def test_tensors_that_say_nothing_new(directory: Path) -> None:
    rewrite_weights(directory, {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)})
    assert open_model(directory).config.num_layers == 3


def test_a_tied_model_that_stores_its_head(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "smollm2")
    weights = tiny_weights(tiny_config("smollm2"))
    write_shards(path, {**weights, "lm_head.weight": np.zeros_like(weights["model.embed_tokens.weight"])}, "f32", 1)
    assert open_model(path).config.tie_word_embeddings


def test_gguf_errors_name_the_file(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "bad.gguf", "llama2", "F32", rms_norm_eps=-1.0)
    with pytest.raises(ModelError, match=r"bad\.gguf: rms_norm_eps is -1\.0"):
        open_model(tmp_path / "bad.gguf")


def test_gguf_rope_tensor_of_another_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.models.tiny_gguf._llama3_divisors", lambda config: np.ones(5, np.float32))
    make_tiny_gguf(tmp_path / "bad.gguf", "llama3", "F32")
    with pytest.raises(ModelError, match=r"'rope_freqs\.weight' has the shape \[5\] where .* asks for \[8\]"):
        open_model(tmp_path / "bad.gguf")


# -- dtypes ------------------------------------------------------------------------------------------------------------


def test_weights_dtype(tmp_path: Path) -> None:
    exact = open_model(make_tiny_model(tmp_path / "f32", "llama2", dtype="f32")).stored_dtype
    half = open_model(make_tiny_model(tmp_path / "f16", "llama2", dtype="f16")).stored_dtype
    assert resolve_weights_dtype("auto", exact) == "f32"
    assert resolve_weights_dtype("auto", half) == "bf16"
    assert resolve_weights_dtype("f32", half) == "f32"
    with pytest.raises(ConfigError, match="--weights-dtype 'int3' is not one of auto, f32, bf16"):
        resolve_weights_dtype("int3", half)


# -- digest ------------------------------------------------------------------------------------------------------------


def test_digest_is_of_the_content(tmp_path: Path) -> None:
    digests = [
        open_model(make_tiny_model(tmp_path / "a", "llama2")).digest,
        open_model(make_tiny_model(tmp_path / "b", "llama2", seed=1)).digest,
        open_model(make_tiny_model(tmp_path / "c", "llama2", rope_theta=5e5)).digest,
        open_model(make_tiny_model(tmp_path / "d", "llama2", dtype="bf16")).digest,
        open_model(make_tiny_model(tmp_path / "e", "mistral")).digest,
    ]
    assert len(set(digests)) == 5
    assert all(len(digest) == 64 for digest in digests)
    again = open_model(make_tiny_model(tmp_path / "elsewhere", "llama2"))
    sharded = open_model(make_tiny_model(tmp_path / "sharded", "llama2", num_shards=3))
    assert again.digest == sharded.digest == digests[0]


def test_digest_sees_one_changed_tensor(directory: Path) -> None:
    before = open_model(directory).digest
    values = tiny_weights(tiny_config("llama2"))["model.layers.2.mlp.down_proj.weight"]
    rewrite_weights(directory, {"model.layers.2.mlp.down_proj.weight": values * np.float32(1.001)})
    assert open_model(directory).digest != before


# -- loading -----------------------------------------------------------------------------------------------------------


def test_progress_rises_to_the_whole(directory: Path) -> None:
    seen: list[tuple[int, int]] = []
    source = open_model(directory)
    load_model(source, ReferenceOps(), "f32", lambda done, total: seen.append((done, total)))
    total = sum(header.num_bytes for header in source.weights.file.tensors.values())
    assert {most for _, most in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[0][0] < total / 2
    assert seen[-1][0] == total


class CountingOps(ReferenceOps):
    """Counts what is packed, and may run out of memory."""

    def __init__(self, most: int = 10**9) -> None:
        self.num_bytes = 0
        self.most = most

    def pack_linear(self, weight: F32, bias: F32 | None, weights_dtype: str) -> ReferenceLinear:
        packed = super().pack_linear(weight, bias, weights_dtype)
        self.num_bytes += packed.num_bytes
        if self.num_bytes > self.most:
            raise MemoryError
        return packed


def test_weights_bytes_are_those_packed(tmp_path: Path) -> None:
    source = open_model(make_tiny_model(tmp_path, "qwen3"))
    ops = CountingOps()
    model = load_model(source, ops, "f32")
    norm_bytes = sum(header.num_bytes for header in source.weights.file.tensors.values() if len(header.shape) == 1)
    assert model.weights_bytes == ops.num_bytes + norm_bytes


@pytest.mark.parametrize("family", ["llama2", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_headers_tell_how_many_bytes_the_weights_will_take(tmp_path: Path, family: str, dtype: str) -> None:
    source = open_model(make_tiny_model(tmp_path, family))
    loaded = load_model(source, NativeOps(1), dtype).weights_bytes
    assert 0.9 * loaded <= source.weights_bytes(dtype) <= loaded


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_file_that_is_cut_after_it_was_opened_is_told(tmp_path: Path, kind: str) -> None:
    if kind == "gguf":
        path = file = tmp_path / "a.gguf"
        make_tiny_gguf(file, "qwen2", "Q8_0")
    else:
        path = make_tiny_model(tmp_path / "model", "llama2")
        file = path / "model.safetensors"
    source = open_model(path)
    with file.open("r+b") as cut:
        cut.truncate(1000)
    with pytest.raises(ModelError, match=r"has become shorter while it was read .* load it again"):
        load_model(source, CountingOps(), "f32")


def test_no_memory_is_one_sentence(directory: Path) -> None:
    with pytest.raises(MemoryBudgetError, match=r"not enough memory for the weights of .*choose a smaller model"):
        load_model(open_model(directory), CountingOps(most=50_000), "f32")


def test_kv_groups(directory: Path) -> None:
    (group,) = load_model(open_model(directory), ReferenceOps(), "f32").kv_groups("bf16")
    assert (group.layer_indices, group.num_kv_heads, group.head_dim, group.kv_format) == ((0, 1, 2), 2, 16, "bf16")


def test_packed_linear_protocol_is_met() -> None:
    linear: PackedLinear = ReferenceOps().pack_linear(np.zeros((4, 2), np.float32), None, "f32")
    assert (linear.num_outputs, linear.num_inputs) == (4, 2)


# -- generation defaults -----------------------------------------------------------------------------------------------


def test_end_tokens(directory: Path) -> None:
    assert open_model(directory).generation.eos_token_ids == (2, 0)
    rewrite(directory, "generation_config.json", eos_token_id=7)
    assert open_model(directory).generation.eos_token_ids == (7,)
    rewrite(directory, "generation_config.json", eos_token_id=[1, 99999, 1])
    assert open_model(directory).generation.eos_token_ids == (1,)
    (directory / "generation_config.json").unlink()
    assert open_model(directory).generation.eos_token_ids == (2,)
    rewrite(directory, "config.json", eos_token_id=None)
    assert open_model(directory).generation.eos_token_ids == ()


def test_sampling_advice(directory: Path) -> None:
    assert open_model(directory).generation.sampling == {}
    rewrite(directory, "generation_config.json", temperature=0.6, top_p=0.9, top_k=20, do_sample=True, min_p=None)
    assert open_model(directory).generation.sampling == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"top_k": True}, "top_k is True"),
        ({"eos_token_id": "two"}, "eos_token_id is 'two'"),
        ({"eos_token_id": [[2]]}, "eos_token_id is"),
        ({"bos_token_id": 1.5}, "bos_token_id is 1.5"),
    ],
)
def test_impossible_defaults(fields: dict[str, Any], words: str, directory: Path) -> None:
    rewrite(directory, "generation_config.json", **fields)
    with pytest.raises(ModelError, match=words):
        open_model(directory)


def test_chat_template_of_the_tokenizer_config(directory: Path) -> None:
    assert open_model(directory).generation.chat_template == CHAT_TEMPLATE
    rewrite(directory, "tokenizer_config.json", chat_template=None)
    assert open_model(directory).generation.chat_template is None
    (directory / "tokenizer_config.json").unlink()
    assert open_model(directory).generation.chat_template is None


def test_named_chat_templates(directory: Path) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    rewrite(directory, "tokenizer_config.json", chat_template=named)
    generation = open_model(directory).generation
    assert generation.chat_template == "A"
    assert generation.chat_templates == {"default": "A", "tool_use": "B"}


def test_chat_template_files_win(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("file é")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert open_model(directory).generation.chat_templates == {"default": "file é", "rag": "R"}


@pytest.mark.parametrize("template", [5, [{"template": "A"}], [5], [{"name": "x", "template": None}], "x" * (2 << 20)])
def test_impossible_chat_templates(template: Any, directory: Path) -> None:
    rewrite(directory, "tokenizer_config.json", chat_template=template)
    with pytest.raises(ModelError, match="chat template"):
        open_model(directory)


def test_a_template_file_that_is_no_text(directory: Path) -> None:
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="cannot be read as text"):
        open_model(directory)
