"""Tiles of 16-bit numbers: two dimensions (K) or two tokens (V) of one head beside each other.

K: [head_dim / 2][16][2]; V: [8][head_dim][2]. What the bits mean is not known here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.core.kv_bytes import TILE_TOKENS

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]


def write_k(tile: U8, slot: int, bits: U16) -> None:
    """bits [n, head_dim] of tokens slot, slot + 1, ... into a tile of 32 * head_dim bytes."""
    n, head_dim = bits.shape
    places = tile.view(np.uint16).reshape(head_dim // 2, TILE_TOKENS, 2)
    places[:, slot : slot + n] = bits.reshape(n, -1, 2).transpose(1, 0, 2)


def write_v(tile: U8, slot: int, bits: U16) -> None:
    n, head_dim = bits.shape
    places = tile.view(np.uint16).reshape(TILE_TOKENS // 2, head_dim, 2)
    for i in range(n):
        places[(slot + i) // 2, :, (slot + i) % 2] = bits[i]


def read_k(tile: U8) -> U16:
    """-> [16, head_dim]"""
    return tile.view(np.uint16).reshape(-1, TILE_TOKENS, 2).transpose(1, 0, 2).reshape(TILE_TOKENS, -1)


def read_v(tile: U8) -> U16:
    return tile.view(np.uint16).reshape(TILE_TOKENS // 2, -1, 2).transpose(0, 2, 1).reshape(TILE_TOKENS, -1)
