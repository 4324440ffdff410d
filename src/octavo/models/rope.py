"""The cos and sin tables of rotary position embedding. It knows positions and frequencies, no queries and keys.

The angles are those of transformers (frequency and product in float32). Their cos and sin are taken in double precision
and rounded once: the nearest float32, whatever the machine's vector library does. A row depends on its position alone,
so a table that grows never changes what it had.
"""

from __future__ import annotations

import math

import numpy as np

from octavo.kernels.ops import F32, RopeTable
from octavo.models.config import RopeConfig
from octavo.models.yarn import yarn_frequencies

_CHUNK_POSITIONS = 1024  # rows are made in chunks of this shape only
_READY_POSITIONS = 4096  # made at once, so that a first prompt does not wait for them


def inverse_frequencies(rope: RopeConfig, rotary_dim: int, divisors: F32 | None = None) -> F32:
    """Radians per position of each pair of dimensions: [rotary_dim / 2].

    `divisors` [rotary_dim / 2] is what GGUF files carry as rope_freqs.weight (the scaling of Llama 3, precomputed).
    """
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    powers = np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)  # as torch rounds them
    frequencies: F32 = np.float32(1.0) / powers
    if rope.kind == "linear":
        frequencies = frequencies / np.float32(rope.factor)
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.kind == "yarn":
        frequencies = yarn_frequencies(rope, frequencies, rotary_dim)
    if divisors is not None:
        frequencies = frequencies / divisors
    return frequencies


def _llama3(rope: RopeConfig, frequencies: F32) -> F32:
    """Long waves are slowed by the factor, short ones kept, and those between are blended (Llama 3.1)."""
    one, context = np.float32(1), np.float32(rope.original_max_positions)
    wavelengths = (one / frequencies) * np.float32(2 * math.pi)  # in torch's order of operations
    longest = np.float32(rope.original_max_positions / rope.low_freq_factor)
    shortest = np.float32(rope.original_max_positions / rope.high_freq_factor)
    turns = (one / wavelengths) * context
    blend = (turns - np.float32(rope.low_freq_factor)) / np.float32(rope.high_freq_factor - rope.low_freq_factor)
    slowed = frequencies / np.float32(rope.factor)
    between = (one - blend) * frequencies / np.float32(rope.factor) + blend * frequencies
    scaled: F32 = np.where(wavelengths > longest, slowed, np.where(wavelengths < shortest, frequencies, between))
    return scaled


def rope_tables(rope: RopeConfig, rotary_dim: int, max_positions: int, divisors: F32 | None = None) -> RopeTables:
    return RopeTables(inverse_frequencies(rope, rotary_dim, divisors), max_positions, rope.magnitude)


class RopeTables:
    """Makes the table for the first positions, and for as many as are ever asked for. Owned by one model."""

    def __init__(self, frequencies: F32, max_positions: int, magnitude: float = 1.0) -> None:
        """magnitude: what cos and sin are multiplied by. No frequencies: a table that rotates nothing."""
        self._frequencies = frequencies
        self._max_positions = max_positions
        self._magnitude = magnitude
        empty = np.empty((0, len(frequencies)), np.float32)
        self._table = RopeTable(empty, empty)
        self.upto(min(_READY_POSITIONS, max_positions))

    @property
    def num_bytes(self) -> int:
        return self._table.cos.nbytes + self._table.sin.nbytes

    def upto(self, num_positions: int) -> RopeTable:
        """A table that holds positions 0 to num_positions - 1 at least."""
        assert num_positions <= self._max_positions, f"position {num_positions - 1} is past the model's last one"
        have = len(self._table.cos)
        if num_positions > have:
            wanted = max(num_positions, min(2 * have, self._max_positions))
            chunks = range(have, wanted, _CHUNK_POSITIONS)
            made = [self._make(start) for start in chunks]
            cos = np.concatenate([self._table.cos, *(chunk[0] for chunk in made)])
            sin = np.concatenate([self._table.sin, *(chunk[1] for chunk in made)])
            self._table = RopeTable(cos, sin)
        return self._table

    def _make(self, start: int) -> tuple[F32, F32]:
        positions = np.arange(start, start + _CHUNK_POSITIONS, dtype=np.float32)
        angles = (positions[:, None] * self._frequencies).astype(np.float64)
        return (
            (np.cos(angles) * self._magnitude).astype(np.float32),
            (np.sin(angles) * self._magnitude).astype(np.float32),
        )
