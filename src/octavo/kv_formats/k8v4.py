"""K as in `int8`; V in 4 bits with a bfloat16 scale and minimum for each token and head (KIVI's way with V, 2024).

minimum = bfloat16(smallest value), scale = bfloat16((largest - smallest) / 15); code = (value - minimum) / scale, to
the nearest, ties to even, within 0 to 15. Decoded: bfloat16(scale * code + minimum), but for kernels that multiply
codes as whole numbers and need no such rounding. A V tile: codes, 16 scales, 16 minima; codes are
[4][head_dim / 32][16][4]: four tokens to a word, dimensions d (low bits) and d + 16 of each 32 to a byte.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.core.kv_bytes import TILE_TOKENS
from octavo.kv_formats import bf16, int8

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

EXTRA_BYTES = 4 * TILE_TOKENS

write_k = int8.write_k
decode_k = int8.decode_k


def encode(x: F32) -> tuple[U8, U16, U16]:
    """x [n, head_dim] -> codes [n, head_dim], and the bits of scales and minima [n]; NaN where x is not finite."""
    x = np.ascontiguousarray(x, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = x.min(axis=1), x.max(axis=1)
        scale_bits, low_bits = bf16.to_bits((high - low) / np.float32(15)), bf16.to_bits(low)
        scale, minimum = bf16.from_bits(scale_bits), bf16.from_bits(low_bits)
    finite = np.isfinite(x).all(axis=1) & np.isfinite(scale) & np.isfinite(minimum)
    nothing = np.float32(0)
    safe = np.where(finite[:, None], x, nothing) - np.where(finite, minimum, nothing)[:, None]
    divisor = np.where(finite & (scale > 0), scale, np.float32(np.inf))[:, None]
    with np.errstate(over="ignore"):
        codes = np.clip(np.rint(safe / divisor), 0, 15).astype(np.uint8)
    nan = np.uint16(0x7FC0)
    return codes, np.where(finite, scale_bits, nan), np.where(finite, low_bits, nan)


def decode(codes: U8, scales: U16, minima: U16) -> F32:
    """codes [16, head_dim], scales and minima [16]"""
    return bf16.round_trip(codes * bf16.from_bits(scales)[:, None] + bf16.from_bits(minima)[:, None])


def write_v(tile: U8, slot: int, v: F32) -> None:
    """v [n, head_dim] of tokens slot, slot + 1, ... into the bytes of a V tile."""
    codes, scales, minima = encode(v)
    halves = codes.reshape(len(v), -1, 2, 16)  # [n, head_dim / 32, low or high bits, 16]
    places = tile[:-EXTRA_BYTES].reshape(4, -1, 16, 4)
    for i in range(len(v)):
        places[(slot + i) // 4, :, :, (slot + i) % 4] = halves[i, :, 0] | halves[i, :, 1] << 4
    extras = tile[-EXTRA_BYTES:].view(np.uint16).reshape(2, TILE_TOKENS)
    extras[:, slot : slot + len(v)] = scales, minima


def decode_v(tile: U8) -> F32:
    """The bytes of a V tile -> [16, head_dim]."""
    packed = tile[:-EXTRA_BYTES].reshape(4, -1, 16, 4).transpose(0, 3, 1, 2)  # [4, 4, head_dim / 32, 16]
    codes = np.stack([packed & 15, packed >> 4], axis=3).reshape(TILE_TOKENS, -1)
    scales, minima = tile[-EXTRA_BYTES:].view(np.uint16).reshape(2, TILE_TOKENS)
    return decode(codes, scales, minima)
