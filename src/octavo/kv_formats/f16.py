"""K and V as IEEE half precision (round to nearest even), in tiles as in `pairs`.

Beyond 65504 a number becomes an infinity, as in every cast to this type: models that need more range take bf16.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.kv_formats import pairs

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]


def to_bits(x: F32) -> U16:
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(x, np.float32).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), (bits & 0x8000) | 0x7E00, bits).astype(np.uint16)


def write_k(tile: U8, slot: int, k: F32) -> None:
    """k [n, head_dim] of tokens slot, slot + 1, ... into the bytes of a K tile."""
    pairs.write_k(tile, slot, to_bits(k))


def write_v(tile: U8, slot: int, v: F32) -> None:
    """v [n, head_dim] of tokens slot, slot + 1, ... into the bytes of a V tile."""
    pairs.write_v(tile, slot, to_bits(v))


def decode_k(tile: U8) -> F32:
    """The bytes of a K tile -> [16, head_dim]."""
    return pairs.read_k(tile).view(np.float16).astype(np.float32)


def decode_v(tile: U8) -> F32:
    """The bytes of a V tile -> [16, head_dim]."""
    return pairs.read_v(tile).view(np.float16).astype(np.float32)
