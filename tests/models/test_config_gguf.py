"""What GGUF metadata is read as, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.errors import ModelError
from octavo.models.config import RopeConfig
from octavo.models.families import config_from_gguf
from octavo.models.llama_config import LlamaConfig

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5e5,
}
SHAPES: dict[str, tuple[int, ...]] = {"token_embd.weight": (320, 64), "output.weight": (320, 64)}


def read(shapes: dict[str, tuple[int, ...]] = SHAPES, **overrides: Any) -> LlamaConfig:
    """Overrides name keys of llama with "__" for "."."""
    named = {f"llama.{name.replace('__', '.')}": value for name, value in overrides.items()}
    return config_from_gguf({**METADATA, **named}, shapes)


def test_llama() -> None:
    config = read()
    assert config == LlamaConfig(
        architecture="LlamaForCausalLM",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope=RopeConfig(5e5),
        max_position_embeddings=256,
    )


def test_tensors_tell_what_metadata_does_not() -> None:
    config = read({"token_embd.weight": (320, 64), "blk.0.attn_q.bias": (64,), "blk.0.attn_q_norm.weight": (16,)})
    assert config.tie_word_embeddings
    assert config.qkv_bias
    assert config.q_k_norm
    assert not config.output_bias


def test_rope() -> None:
    assert read(rope__scaling__type="none", rope__scaling__factor=8.0).rope == RopeConfig(5e5)
    assert read(rope__scaling__type="linear", rope__scaling__factor=4.0).rope == RopeConfig(5e5, "linear", 4.0)
    assert read(rope__scale_linear=2.0).rope == RopeConfig(5e5, "linear", 2.0)
    for kind in ("su", "longrope"):
        with pytest.raises(ModelError, match=f"rope type '{kind}' is not supported yet"):
            read(rope__scaling__type=kind, rope__scaling__factor=4.0)


def test_window() -> None:
    assert read(attention__sliding_window=64).windows == (64, 64)
    assert read(attention__sliding_window=0).windows == ()


@pytest.mark.parametrize("name", ["mamba", "llama4", "bert"])
def test_other_architectures_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"architecture '{name}' is .*supported are LlamaForCausalLM"):
        config_from_gguf({"general.architecture": name}, SHAPES)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"expert_count": 8}, r"no llama\.expert_used_count"),
        ({"expert_count": 8, "expert_used_count": 9}, "num_experts_per_tok is 9; it must be 1 to the 8 experts"),
        ({"attention__scale": 0.01}, "attention.scale is not supported"),
        ({"logit_scale": 2.0}, "logit_scale is not supported"),
        ({"rope__dimension_count": 8}, "rope.dimension_count is 8 where heads have 16"),
        ({"attention__value_length": 32}, "attention.value_length is 32"),
        ({"attention__key_length": 24, "attention__value_length": 24, "rope__dimension_count": 24}, "head_dim 24"),
        ({"attention__head_count": np.array([4, 2], np.int32)}, "only one number for all layers is supported"),
        ({"feed_forward_length": ["96"] * 100000}, "only one number for all layers is supported"),
        ({"block_count": "2"}, "block_count is '2'"),
        ({"block_count": -1}, "num_layers is -1"),
        ({"attention__head_count": 0}, "num_heads is 0"),
        ({"attention__head_count": -4}, "num_heads is -4"),
        ({"embedding_length": 2**64 - 1}, "hidden_size is"),
        ({"attention__layer_norm_rms_epsilon": float("inf")}, "rms_norm_eps is inf"),
        ({"rope__freq_base": "x"}, "rope.freq_base is 'x'"),
        ({"rope__scaling__type": np.arange(9)}, "rope.scaling.type is"),
    ],
)
def test_impossible_values_are_refused(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        read(**overrides)
    assert len(str(caught.value)) < 400


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ModelError, match=r"general\.architecture"):
        config_from_gguf({}, SHAPES)
    with pytest.raises(ModelError, match=r"no tensor token_embd\.weight"):
        config_from_gguf(METADATA, {})
    for name in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"):
        metadata = {key: value for key, value in METADATA.items() if key != f"llama.{name}"}
        with pytest.raises(ModelError, match=f"no llama.{name}"):
            config_from_gguf(metadata, SHAPES)
