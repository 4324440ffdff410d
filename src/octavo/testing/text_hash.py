"""A hash of a text that grows with it, the same in every process. It stands in for what K and V depend on."""

from __future__ import annotations

from collections.abc import Sequence

_MASK = 2**64 - 1


def extend_hash(prefix: int, token: int) -> int:
    """The hash of a text that has one token more."""
    mixed = ((prefix ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & _MASK
    return mixed ^ (mixed >> 31)


def hash_of(tokens: Sequence[int]) -> int:
    """The hash of a text."""
    prefix = 0
    for token in tokens:
        prefix = extend_hash(prefix, token)
    return prefix
