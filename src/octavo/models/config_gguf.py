"""Typed access to GGUF metadata, and what every family reads from it alike. It knows key names, no files.

Where metadata is silent (biases, tied heads, q and k norms), the tensors that the file holds tell.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.models.config import RopeConfig
from octavo.models.yarn import yarn_rope

Shapes = Mapping[str, tuple[int, ...]]  # tensor -> [rows, columns]

# Keys that change the arithmetic in ways that no family here has.
_REFUSED = ("attention.scale", "logit_scale", "embedding_scale", "residual_scale", "attention.clamp_kqv")


class Keys:
    """Typed access to `<architecture>.<key>`; an error names key, value and what is expected."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, shapes: Shapes) -> None:
        self.architecture = architecture
        self.shapes = shapes
        self._metadata = metadata

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int:
            what = "one number for all layers" if isinstance(value, np.ndarray | list) else "a whole number"
            raise ModelError(
                f"GGUF metadata {self.architecture}.{key} is {reprlib.repr(value)}; only {what} is supported"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float):
            raise ModelError(f"GGUF metadata {self.architecture}.{key} is {reprlib.repr(value)}; it must be a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise ModelError(f"GGUF metadata {self.architecture}.{key} is {reprlib.repr(value)}; it must be a bool")
        return value

    def get(self, key: str, default: object = None) -> Any:
        value = self._metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelError(
                f"the GGUF file has no {self.architecture}.{key}; it is incomplete: download or convert it again"
            )
        return value

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._metadata


def refuse_unknown_arithmetic(keys: Keys) -> None:
    for key in _REFUSED:
        if key in keys and keys.number(key) != 0.0:
            raise ModelError(
                f"GGUF metadata key {key} is not supported (it is {keys.get(key)!r}); choose another model"
            )


def refuse_experts(keys: Keys) -> None:
    """For families of dense models, some of whose names mixtures of experts share."""
    if keys.integer("expert_count", 0):
        raise ModelError(
            f"this GGUF file of architecture {keys.architecture!r} is a mixture of {keys.integer('expert_count')} "
            "experts, which is not supported; choose a dense model"
        )


def head_dim_of(keys: Keys, hidden_size: int, num_heads: int) -> int:
    """K, V and rope all of the same size: ModelError where they are not."""
    head_dim = keys.integer("attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        value = keys.integer(key, head_dim)
        if value != head_dim:
            raise ModelError(
                f"GGUF metadata {key} is {value} where heads have {head_dim} dimensions; only equal numbers are "
                "supported: choose another model"
            )
    return head_dim


def vocab_size_of(keys: Keys) -> int:
    if "vocab_size" in keys:
        return keys.integer("vocab_size")
    if "token_embd.weight" not in keys.shapes:
        raise ModelError("the GGUF file has no tensor token_embd.weight; it is incomplete: download it again")
    return keys.shapes["token_embd.weight"][0]


def rope_of(keys: Keys, theta: float = 10000.0) -> RopeConfig:
    theta = keys.number("rope.freq_base", theta)
    kind = keys.get("rope.scaling.type", "none")
    if not isinstance(kind, str):
        raise ModelError(f"GGUF metadata rope.scaling.type is {reprlib.repr(kind)}; it must be text")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "none" and "rope.scaling.type" in keys:
        return RopeConfig(theta)
    if kind in ("none", "linear"):
        # The oldest files give scale_linear and no type.
        return RopeConfig(theta, "linear", factor=factor) if factor not in (0.0, 1.0) else RopeConfig(theta)
    if kind == "yarn":
        return yarn_rope(theta, factor, keys.integer("rope.scaling.original_context_length"))
    return RopeConfig(theta, kind)
