"""K and V as bfloat16 (round to nearest even; a NaN stays a NaN), in tiles as in `pairs`: the operand
order of the instructions that multiply bf16 pairs, and one shift or mask away from f32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.kv_formats import pairs

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]


def to_bits(x: F32) -> U16:
    """float32 -> the 16 bits of the nearest bfloat16, ties to even; NaN becomes a quiet NaN of the same sign."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_bits(bits: U16) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_trip(x: F32) -> F32:
    return from_bits(to_bits(x))


def write_k(tile: U8, slot: int, k: F32) -> None:
    """k [n, head_dim] of tokens slot, slot + 1, ... into the bytes of a K tile."""
    pairs.write_k(tile, slot, to_bits(k))


def write_v(tile: U8, slot: int, v: F32) -> None:
    """v [n, head_dim] of tokens slot, slot + 1, ... into the bytes of a V tile."""
    pairs.write_v(tile, slot, to_bits(v))


def decode_k(tile: U8) -> F32:
    """The bytes of a K tile -> [16, head_dim]."""
    return from_bits(pairs.read_k(tile))


def decode_v(tile: U8) -> F32:
    """The bytes of a V tile -> [16, head_dim]."""
    return from_bits(pairs.read_v(tile))
