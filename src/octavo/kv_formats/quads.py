"""Tiles of 8-bit codes: four dimensions (K) or four tokens (V) of one head beside each other.

K: [head_dim / 4][16][4]; V: [4][head_dim][4]. What a code means is not known here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]

TILE_TOKENS = 16


def write_k(tile: U8, slot: int, codes: U8) -> None:
    """codes [n, head_dim] of tokens slot, slot + 1, ... into a tile of 16 * head_dim bytes."""
    n, head_dim = codes.shape
    tile.reshape(head_dim // 4, TILE_TOKENS, 4)[:, slot : slot + n] = codes.reshape(n, -1, 4).transpose(1, 0, 2)


def write_v(tile: U8, slot: int, codes: U8) -> None:
    n, head_dim = codes.shape
    places = tile.reshape(4, head_dim, 4)
    for i in range(n):
        places[(slot + i) // 4, :, (slot + i) % 4] = codes[i]


def read_k(tile: U8) -> U8:
    """-> [16, head_dim]"""
    return tile.reshape(-1, TILE_TOKENS, 4).transpose(1, 0, 2).reshape(TILE_TOKENS, -1)


def read_v(tile: U8) -> U8:
    return tile.reshape(4, -1, 4).transpose(0, 2, 1).reshape(TILE_TOKENS, -1)
