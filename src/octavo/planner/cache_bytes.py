"""Bytes of a cache, by group, format and number of tokens: the formulas, and nothing else.

Where octavo itself runs a model, its own `core.kv_spec` counts; a test holds the two equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from octavo.core.kv_bytes import FORMAT_BYTES
from octavo.errors import ConfigError
from octavo.planner.geometry import KVGroup


@dataclass(frozen=True, slots=True)
class Stored:
    """How a vector lies in memory: in blocks of `numbers`, with `extra` bytes (a scale, a minimum) beside them."""

    numbers: int
    num_bytes: int
    extra: int = 0

    def of(self, numbers: int) -> int:
        return -(-numbers // self.numbers) * self.num_bytes + self.extra

    def __str__(self) -> str:
        item = f"{self.num_bytes} bytes" if self.numbers == 1 else f"{self.num_bytes}/{self.numbers} bytes"
        return f"{item} + {self.extra} a vector" if self.extra else item


def _engine_formats() -> dict[str, tuple[Stored, Stored]]:
    """octavo's own formats, K and V, by what it allocates."""
    found = {}
    for name, each in FORMAT_BYTES.items():
        pair = []
        for vector in (each.k, each.v):
            numbers = 8 // math.gcd(8, vector.bits)  # the fewest that fill whole bytes
            pair.append(Stored(numbers, numbers * vector.bits // 8, vector.extra_bytes))
        found[name] = (pair[0], pair[1])
    return found


def _same(numbers: int, num_bytes: int) -> tuple[Stored, Stored]:
    return Stored(numbers, num_bytes), Stored(numbers, num_bytes)


_OTHERS: dict[str, tuple[Stored, Stored]] = {
    "fp8": _same(1, 1),
    "q8_0": _same(32, 34),
    "q5_1": _same(32, 24),
    "q5_0": _same(32, 22),
    "q4_1": _same(32, 20),
    "q4_0": _same(32, 18),
    "nvfp4": _same(16, 9),
}
# format -> K and V; octavo's own come first, also where others call another one the same
FORMATS: dict[str, tuple[Stored, Stored]] = {**_engine_formats()}
FORMATS |= {name: pair for name, pair in _OTHERS.items() if name not in FORMATS}
# What others call the same.
FORMAT_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "fp16": "f16", "fp32": "f32", "half": "f16"}
_INDEX_SCALE_NUMBERS, _INDEX_SCALE_BYTES = 128, 4  # an index key is kept in fp8 with an f32 scale per 128 numbers


def read_format(name: str) -> str:
    """A format by any of its names; ConfigError for none."""
    found = FORMAT_NAMES.get(name.lower(), name.lower())
    if found not in FORMATS:
        raise ConfigError(f"--kv-cache-dtype {name!r} is not one of auto, {', '.join(FORMATS)}")
    return found


def stored_bytes(numbers: int, kv_format: str) -> int:
    """Of one vector of numbers that are no K and no V; a format with blocks pads it to whole blocks."""
    return FORMATS[kv_format][0].of(numbers)


def entry_bytes(group: KVGroup, kv_format: str) -> int:
    """What one layer of the group keeps of one entry (of one token, where none are compressed)."""
    if group.kind == "index":
        return group.index_dim + _INDEX_SCALE_BYTES * -(-group.index_dim // _INDEX_SCALE_NUMBERS)
    k, v = FORMATS[group.kv_format or kv_format]
    return group.num_kv_heads * (k.of(group.head_dim) + (v.of(group.v_head_dim) if group.v_head_dim else 0))


def state_bytes(group: KVGroup, dtype: str, *, conv_dtype: str | None = None) -> int:
    """What one layer of the group keeps of a sequence, however long; `dtype` is the model's."""
    state = stored_bytes(group.state_numbers, group.state_dtype) if group.state_numbers else 0
    return state + (stored_bytes(group.conv_numbers, conv_dtype or dtype) if group.conv_numbers else 0)


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """The cache of a model in one format."""

    groups: tuple[KVGroup, ...]
    kv_format: str
    dtype: str  # the model's, of the states' convolutions

    def per_token(self, group: KVGroup) -> Fraction:
        """Bytes that one more token adds in all layers of the group, as long as it is inside a window."""
        return Fraction(entry_bytes(group, self.kv_format) * group.num_layers, group.tokens_per_entry)

    def per_sequence(self, group: KVGroup) -> int:
        """Bytes of the states of one sequence in all layers of the group."""
        return state_bytes(group, self.dtype) * group.num_layers

    def of_group(self, group: KVGroup, num_tokens: int) -> int:
        """Bytes of one sequence of so many tokens in the group."""
        return entry_bytes(group, self.kv_format) * group.num_layers * group.entries(num_tokens) + self.per_sequence(
            group
        )

    def read(self, num_tokens: int, num_sequences: int = 1) -> int:
        """Bytes that one decode step reads: all of it, but for what sparse attention leaves out."""
        return num_sequences * sum(
            entry_bytes(group, self.kv_format) * group.num_layers * group.read_entries(num_tokens)
            + self.per_sequence(group)
            for group in self.groups
        )

    @property
    def bytes_per_token(self) -> Fraction:
        return sum((self.per_token(group) for group in self.groups), Fraction(0))

    @property
    def bytes_per_sequence(self) -> int:
        return sum(self.per_sequence(group) for group in self.groups)

    def of(self, num_tokens: int, num_sequences: int = 1) -> int:
        """Bytes of so many sequences of so many tokens, nothing shared and nothing rounded to blocks."""
        return num_sequences * sum(self.of_group(group, num_tokens) for group in self.groups)

    def tokens_for(self, num_bytes: int, num_sequences: int = 1) -> int | None:
        """The least number of tokens of each sequence whose cache has at least so many bytes; None: it never has."""
        grows = any(group.window is None and group.kind != "state" for group in self.groups)
        high = 1
        while self.of(high, num_sequences) < num_bytes:
            if high > 1 << 60 or (not grows and high > _longest_window(self.groups)):
                return None
            high *= 2
        low = high // 2
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.of(middle, num_sequences) >= num_bytes else (middle, high)
        return high


def _longest_window(groups: Iterable[KVGroup]) -> int:
    return max((group.window or 0 for group in groups), default=0)


def sharded(group: KVGroup, ranks: int) -> KVGroup:
    """What one of `ranks` tensor-parallel ranks keeps: its KV heads, at least one (then several ranks keep the same).

    Latents and index keys serve all heads, so that every rank keeps them whole; states are split by heads.
    """
    return replace(
        group,
        num_kv_heads=group.num_kv_heads if group.kind == "latent" else -(-group.num_kv_heads // ranks),
        state_numbers=-(-group.state_numbers // ranks) if group.kind == "state" else group.state_numbers,
        conv_numbers=-(-group.conv_numbers // ranks),
    )
