"""What a config.json is read as, and what is refused: by name, with what is supported instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError, ModelError
from octavo.models.config import SUPPORTED_ARCHITECTURES, RopeConfig, check_context
from octavo.models.families import FAMILIES as READERS
from octavo.models.families import config_from_json
from octavo.models.llama_config import LlamaConfig
from tests.models.tiny_models import FAMILIES, tiny_config

LLAMA3_ROPE = FAMILIES["llama3"]["rope_scaling"]


def read(family: str = "llama2", **overrides: Any) -> LlamaConfig:
    return config_from_json(tiny_config(family, **overrides))


def without(*names: str, family: str = "llama2", **overrides: Any) -> LlamaConfig:
    config = tiny_config(family, **overrides)
    return config_from_json({name: value for name, value in config.items() if name not in names})


def test_llama() -> None:
    config = read("llama2")
    assert config.architecture == "LlamaForCausalLM"
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (64, 96, 3)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.rope == RopeConfig(10000.0)
    assert [config.qkv_bias, config.output_bias, config.mlp_bias, config.q_k_norm] == [False] * 4
    assert config.windows == ()


def test_biases_and_norms_of_each_family() -> None:
    bias = read("llama_bias")
    assert bias.qkv_bias
    assert bias.output_bias
    assert bias.mlp_bias
    qwen2 = read("qwen2")
    assert qwen2.qkv_bias
    assert not qwen2.output_bias
    qwen3 = read("qwen3")
    assert qwen3.q_k_norm
    assert not qwen3.qkv_bias
    assert qwen3.head_dim == 32


def test_what_is_left_out_is_the_default_of_the_architecture() -> None:
    assert without("num_key_value_heads").num_kv_heads == 4
    assert read(num_key_value_heads=None).num_kv_heads == 4
    assert without("head_dim").head_dim == 16
    assert without("rms_norm_eps").rms_norm_eps == 1e-6
    assert without("rope_theta").rope.theta == 10000.0
    assert without("max_position_embeddings").max_position_embeddings == 2048
    assert without("tie_word_embeddings").tie_word_embeddings is False
    assert without("sliding_window", family="mistral").windows == (4096,) * 3
    assert without("head_dim", family="qwen3").head_dim == 128
    assert without("architectures").architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(10000.0, "linear", 2.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4}}, RopeConfig(10000.0, "linear", 4.0)),
        ({"rope_scaling": {"rope_type": "default"}}, RopeConfig(10000.0)),
        ({"rope_scaling": LLAMA3_ROPE}, RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 64)),
        ({"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}}, RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, RopeConfig(7.0)),
    ],
)
def test_every_spelling_of_rope(fields: dict[str, Any], rope: RopeConfig) -> None:
    assert read(**fields).rope == rope


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_kinds_that_are_missing_are_refused(kind: str, key: str) -> None:
    with pytest.raises(
        ModelError, match=f"rope type '{kind}' is not supported yet; supported are default, linear, llama3, yarn"
    ):
        read(rope_scaling={key: kind, "factor": 2.0})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("MambaForCausalLM", "'MambaForCausalLM' is not supported; supported are LlamaForCausalLM"),
        ("T5ForConditionalGeneration", "is not supported; supported are LlamaForCausalLM"),
    ],
)
def test_other_architectures_are_refused(name: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read(architectures=[name])


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors"])
def test_quantised_weights_are_refused(method: str) -> None:
    with pytest.raises(ModelError, match=f"quantised with '{method}' are not supported.*GGUF"):
        read(quantization_config={"quant_method": method, "bits": 4})


@pytest.mark.parametrize("field", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_experts_are_refused(field: str) -> None:
    with pytest.raises(ModelError, match=f"{field} is 8, and this architecture has no experts"):
        read(**{field: 8})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": 24}, "head_dim 24 is not supported; it must be a multiple of 16, at most 256"),
        ({"head_dim": 272}, "head_dim 272"),
        ({"head_dim": 0}, "head_dim 0"),
        ({"head_dim": -16}, "head_dim -16"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot be shared out among 3"),
        ({"num_key_value_heads": 0}, "num_kv_heads is 0; it must be 1 to"),
        ({"num_attention_heads": 0, "head_dim": None}, "not a multiple of 0 heads"),
        ({"num_hidden_layers": -1}, "num_layers is -1"),
        ({"num_hidden_layers": 10**9}, "num_layers is 1000000000; it must be 1 to 4096"),
        ({"vocab_size": 10**30}, "vocab_size is"),
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be a whole number"),
        ({"hidden_size": True}, "hidden_size is True; it must be a whole number"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0; it must be a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"rope_theta": 0}, "rope theta is 0.0"),
        ({"rope_theta": 10**400}, "rope_theta is larger"),
        ({"rope_theta": [1]}, r"rope_theta is \[1\]; it must be a number"),
        ({"rope_scaling": {"type": "linear"}}, "no 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor is -2.0"),
        ({"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "must be above low_freq_factor"),
        ({"rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": -5}}, "original_max_position_embeddings"),
        ({"rope_scaling": "linear"}, "must be an object or null"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        ({"architectures": []}, "must be a list of one name"),
        ({"architectures": ["A", "B"]}, "must be a list of one name"),
    ],
)
def test_impossible_values_are_refused(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read(**overrides)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ModelError, match=f"no '{field}'.*download the model again"):
        without(field)


def test_no_architecture_at_all() -> None:
    with pytest.raises(ModelError, match="neither 'architectures' nor 'model_type'"):
        config_from_json({"hidden_size": 64})


def test_windows_in_some_layers() -> None:
    assert read("qwen2", use_sliding_window=True, max_window_layers=1).windows == (None, 128, 128)
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert read("qwen3", layer_types=types, use_sliding_window=True, sliding_window=64).windows == (None, 64, None)
    for wrong in (types[:2], ["chunked_attention"] * 3, "sliding_attention"):
        with pytest.raises(ModelError, match="layer_types"):
            read("qwen3", layer_types=wrong, use_sliding_window=True)


def test_a_window_does_not_limit_the_context() -> None:
    config = read("mistral_window")
    assert config.windows == (128,) * 3
    check_context(config, 512)


@pytest.mark.parametrize("window", [0, -1])
def test_impossible_windows_are_refused(window: int) -> None:
    with pytest.raises(ModelError, match=f"sliding_window is {window}; it must be at least 1 token"):
        read("mistral_window", sliding_window=window)


def test_every_supported_architecture_has_a_family() -> None:
    assert sorted(SUPPORTED_ARCHITECTURES) == sorted(name for family in READERS for name in family.architectures)
    for family in READERS:
        assert set(family.architectures) >= {*family.model_types.values(), *family.gguf_names.values()}
        assert bool(family.gguf_names) == (family.from_gguf is not None)


def test_the_page_of_supported_models_names_them_all() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text()
    rows = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    for family in READERS:
        for name in (*family.architectures, *(name.split()[0] for name in family.gguf_names)):
            assert f"`{name}`" in rows, name


def test_context_within_the_positions() -> None:
    config = read("mistral")
    check_context(config, 512)
    with pytest.raises(ConfigError, match=r"--max-model-len 513 is more than the 512 positions"):
        check_context(config, 513)
    with pytest.raises(ConfigError, match="must be 1 to 512"):
        check_context(config, 0)


def test_an_unused_window_is_none() -> None:
    assert read("qwen2").windows == ()


def test_messages_stay_short() -> None:
    with pytest.raises(ModelError) as caught:
        read(hidden_size=["x" * 1000] * 1000)
    assert len(str(caught.value)) < 400
