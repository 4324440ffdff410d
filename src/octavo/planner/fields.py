"""Typed access to the keys of a model's config, by all the names that a key has. An error names key, value and cure.

It does not know what the keys mean.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError

MAX_LAYERS = 4096  # far above every real model: a hostile config gets an error, not a long wait
_MAX_NUMBER = 1 << 40

# What GPT-2, its heirs and other schemas call what most configs call by the first name.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "hidden_size": ("n_embd", "d_model", "hidden_dim"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "ffn_embed_dim"),
    "max_position_embeddings": ("n_positions", "seq_length", "max_seq_len", "max_sequence_length", "n_ctx"),
    "vocab_size": ("padded_vocab_size",),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads"),
    "head_dim": ("kv_channels",),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk"),
    "dtype": ("torch_dtype",),
    "sliding_window": ("sliding_window_size",),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts"),
}


class Fields:
    """The config's keys; `name` stands in errors."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values = values
        self.name = name

    def get(self, key: str) -> Any:
        """The value under the key or one of its other names; None where there is none, or where it is null."""
        for each in (key, *SYNONYMS.get(key, ())):
            if self.values.get(each) is not None:
                return self.values[each]
        return None

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key)
        if value is None:
            if default is None:
                raise ModelError(
                    f"{self.name} has no {key}; it is not complete: download it again, or give plain numbers"
                )
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value <= _MAX_NUMBER:
            raise ModelError(
                f"{self.name}: {key} is {reprlib.repr(value)}; it must be a whole number from {least} to {_MAX_NUMBER}"
            )
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise ModelError(f"{self.name}: {key} is {reprlib.repr(value)}; it must be a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if type(value) not in (bool, int):
            raise ModelError(f"{self.name}: {key} is {reprlib.repr(value)}; it must be true or false")
        return bool(value)

    def text(self, key: str, default: str = "") -> str:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ModelError(f"{self.name}: {key} is {reprlib.repr(value)}; it must be text")
        return value

    def sequence(self, key: str) -> list[Any] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise ModelError(f"{self.name}: {key} is {reprlib.repr(value)}; it must be a list")
        return list(value)

    def numbers_per_layer(self, key: str, num_layers: int) -> list[int] | None:
        """The same, of whole numbers that are not negative."""
        found = self.per_layer(key, num_layers)
        for each in found or ():
            if type(each) is not int or not 0 <= each <= _MAX_NUMBER:
                raise ModelError(f"{self.name}: {key} has {reprlib.repr(each)}; it must have whole numbers")
        return found

    def layers(self, key: str) -> list[int]:
        """A list of layers; [] where there is none."""
        found = self.sequence(key) or []
        for each in found:
            if type(each) is not int or not 0 <= each <= MAX_LAYERS:
                raise ModelError(f"{self.name}: {key} has {reprlib.repr(each)}; it must be a list of layers")
        return found

    def section(self, key: str) -> Fields | None:
        """An object inside the config, as fields of its own."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.name}: {reprlib.repr(key)} is {reprlib.repr(value)}; it must be an object")
        return Fields(value, f"{self.name}: {key if key.isprintable() else reprlib.repr(key)}")

    def per_layer(self, key: str, num_layers: int) -> list[Any] | None:
        """A list with one value for each layer; longer ones (with layers for speculation) are cut."""
        found = self.sequence(key)
        if found is None:
            return None
        if len(found) < num_layers:
            raise ModelError(
                f"{self.name}: {key} has {len(found)} values for {num_layers} layers; it must have one for each layer"
            )
        return found[:num_layers]

    def filled(self, defaults: Mapping[str, Any]) -> Fields:
        """The same with these values where there are none."""
        missing = {key: value for key, value in defaults.items() if not self.has(key)}
        return Fields({**self.values, **missing}, self.name) if missing else self
