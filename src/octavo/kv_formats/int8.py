"""K and V as 8-bit integers with one bfloat16 scale for each token and head, made from the token alone.

scale = bfloat16(largest absolute value / 127); code = value / scale, to the nearest, ties to even, within -127 to 127.
A K tile: codes as in `quads`, then the 16 scales; a V tile: the 16 scales, then the codes. So the scales of a pair
lie beside each other, and its codes begin at lines of memory. A vector with a NaN or an infinity gets a NaN for its
scale. What comes here of K and V is turned already (`hadamard`); of latents it is not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.core.kv_bytes import TILE_TOKENS
from octavo.kv_formats import bf16, quads

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

SCALES_BYTES = 2 * TILE_TOKENS


def encode(x: F32) -> tuple[U8, U16]:
    """x [n, head_dim] -> codes [n, head_dim] and the bits of the scales [n]."""
    x = np.ascontiguousarray(x, np.float32)
    finite = np.asarray(np.isfinite(x).all(axis=1))
    safe = np.where(finite[:, None], x, np.float32(0))
    scale_bits = bf16.to_bits(np.abs(safe).max(axis=1) / np.float32(127))
    scale = bf16.from_bits(scale_bits)[:, None]
    with np.errstate(over="ignore"):
        steps = np.rint(safe / np.where(scale == 0, np.float32(np.inf), scale))
    codes = np.clip(steps, -127, 127).astype(np.int8).view(np.uint8)
    return codes, np.where(finite, scale_bits, 0x7FC0).astype(np.uint16)


def decode(codes: U8, scales: U16) -> F32:
    """codes [16, head_dim], scales [16]"""
    return codes.view(np.int8).astype(np.float32) * bf16.from_bits(scales)[:, None]


def write_k(tile: U8, slot: int, k: F32) -> None:
    """k [n, head_dim] of tokens slot, slot + 1, ... into the bytes of a K tile."""
    codes, scales = encode(k)
    quads.write_k(tile[:-SCALES_BYTES], slot, codes)
    tile[-SCALES_BYTES:].view(np.uint16)[slot : slot + len(k)] = scales


def write_v(tile: U8, slot: int, v: F32) -> None:
    """v [n, head_dim] of tokens slot, slot + 1, ... into the bytes of a V tile."""
    codes, scales = encode(v)
    quads.write_v(tile[SCALES_BYTES:], slot, codes)
    tile[:SCALES_BYTES].view(np.uint16)[slot : slot + len(v)] = scales


def decode_k(tile: U8) -> F32:
    """The bytes of a K tile -> [16, head_dim]."""
    return decode(quads.read_k(tile[:-SCALES_BYTES]), tile[-SCALES_BYTES:].view(np.uint16))


def decode_v(tile: U8) -> F32:
    """The bytes of a V tile -> [16, head_dim]."""
    return decode(quads.read_v(tile[SCALES_BYTES:]), tile[:SCALES_BYTES].view(np.uint16))
