"""From GGUF metadata to a ModelConfig. It knows key names, no files.

Where metadata is silent (biases, tied heads, q and k norms), the tensors that the file holds tell.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.models.config import ModelConfig, RopeConfig, refuse_architecture

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Keys that change the arithmetic in ways that are not implemented.
_REFUSED = ("attention.scale", "logit_scale", "embedding_scale", "residual_scale", "attention.clamp_kqv")


def config_from_gguf(metadata: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """The config of a file with this metadata and tensors of these shapes [rows, columns]; dtype is left at f32."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelError("the GGUF file does not say its general.architecture; it is not a language model's file")
    if name not in _ARCHITECTURES:
        raise refuse_architecture(name)
    keys = _Keys(metadata, name)
    _refuse_what_is_missing(keys)
    num_heads, hidden_size = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden_size // max(num_heads, 1))
    _check_head_dims(keys, head_dim)
    return ModelConfig(
        architecture=_ARCHITECTURES[name],
        vocab_size=_vocab_size(keys, tensor_shapes),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(keys),
        max_position_embeddings=keys.integer("context_length"),
        tie_word_embeddings="output.weight" not in tensor_shapes,
        qkv_bias="blk.0.attn_q.bias" in tensor_shapes,
        output_bias="blk.0.attn_output.bias" in tensor_shapes,
        mlp_bias="blk.0.ffn_up.bias" in tensor_shapes,
        q_k_norm="blk.0.attn_q_norm.weight" in tensor_shapes,
        sliding_window=keys.integer("attention.sliding_window", 0) or None,
    )


class _Keys:
    """Typed access to `<architecture>.<key>`; an error names key, value and what is expected."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._architecture = architecture

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int:
            what = "one number for all layers" if isinstance(value, np.ndarray | list) else "a whole number"
            raise ModelError(
                f"GGUF metadata {self._architecture}.{key} is {reprlib.repr(value)}; only {what} is supported"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float):
            raise ModelError(f"GGUF metadata {self._architecture}.{key} is {reprlib.repr(value)}; it must be a number")
        return float(value)

    def get(self, key: str, default: object = None) -> Any:
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        if value is None:
            raise ModelError(
                f"the GGUF file has no {self._architecture}.{key}; it is incomplete: download or convert it again"
            )
        return value

    def __contains__(self, key: str) -> bool:
        return f"{self._architecture}.{key}" in self._metadata


def _refuse_what_is_missing(keys: _Keys) -> None:
    if keys.integer("expert_count", 0):
        raise ModelError(
            f"this GGUF file is a mixture of {keys.integer('expert_count')} experts, which is not supported; choose a "
            "dense model"
        )
    for key in _REFUSED:
        if key in keys and keys.number(key) != 0.0:
            raise ModelError(
                f"GGUF metadata key {key} is not supported (it is {keys.get(key)!r}); choose another model"
            )


def _check_head_dims(keys: _Keys, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        value = keys.integer(key, head_dim)
        if value != head_dim:
            raise ModelError(
                f"GGUF metadata {key} is {value} where heads have {head_dim} dimensions; only equal numbers are "
                "supported: choose another model"
            )


def _vocab_size(keys: _Keys, tensor_shapes: Mapping[str, tuple[int, ...]]) -> int:
    if "vocab_size" in keys:
        return keys.integer("vocab_size")
    if "token_embd.weight" not in tensor_shapes:
        raise ModelError("the GGUF file has no tensor token_embd.weight; it is incomplete: download it again")
    return tensor_shapes["token_embd.weight"][0]


def _rope(keys: _Keys) -> RopeConfig:
    theta = keys.number("rope.freq_base", 10000.0)
    kind = keys.get("rope.scaling.type", "none")
    if not isinstance(kind, str):
        raise ModelError(f"GGUF metadata rope.scaling.type is {reprlib.repr(kind)}; it must be text")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "none" and "rope.scaling.type" in keys:
        return RopeConfig(theta)
    if kind in ("none", "linear"):
        # The oldest files give scale_linear and no type.
        return RopeConfig(theta, "linear", factor=factor) if factor not in (0.0, 1.0) else RopeConfig(theta)
    return RopeConfig(theta, kind)
