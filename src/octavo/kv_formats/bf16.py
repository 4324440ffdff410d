"""K and V as bfloat16 (round to nearest even; a NaN stays a NaN), 16 tokens of one head to a tile.

K: [head_dim / 2][16][2], pairs of dimensions; V: [8][head_dim][2], pairs of tokens: the operand orders of the
instructions that multiply bf16 pairs, and one shift or mask away from f32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

TILE_TOKENS = 16
ITEM_BYTES = 2


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


def encode_k(k: F32) -> U8:
    """k [16, head_dim] -> the bytes of a K tile."""
    pairs = to_bits(k).reshape(TILE_TOKENS, -1, 2).transpose(1, 0, 2)
    return np.ascontiguousarray(pairs).view(np.uint8).reshape(-1)


def encode_v(v: F32) -> U8:
    """v [16, head_dim] -> the bytes of a V tile."""
    pairs = to_bits(v).reshape(TILE_TOKENS // 2, 2, -1).transpose(0, 2, 1)
    return np.ascontiguousarray(pairs).view(np.uint8).reshape(-1)


def decode_k(tile: U8) -> F32:
    """The bytes of a K tile -> [16, head_dim]."""
    return from_bits(tile.view(np.uint16).reshape(-1, TILE_TOKENS, 2).transpose(1, 0, 2).reshape(TILE_TOKENS, -1))


def decode_v(tile: U8) -> F32:
    """The bytes of a V tile -> [16, head_dim]."""
    return from_bits(tile.view(np.uint16).reshape(TILE_TOKENS // 2, -1, 2).transpose(0, 2, 1).reshape(TILE_TOKENS, -1))
