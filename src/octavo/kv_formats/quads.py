"""Tiles of 8-bit codes: four dimensions (K) or four tokens (V) of one head beside each other.

A line of 64 bytes has 16 fours, cut so that the two bytes that are multiplied together stay together, and each half of
16 bytes widens to one operand: K [head_dim / 4][4 x 4 tokens][2][4][2],
V [4][head_dim / 16][4 x 4 dimensions][2][4][2].
What a code means is not known here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.core.kv_bytes import TILE_TOKENS

U8 = npt.NDArray[np.uint8]


def write_k(tile: U8, slot: int, codes: U8) -> None:
    """codes [n, head_dim] of tokens slot, slot + 1, ... into a tile of 16 * head_dim bytes."""
    places = tile.reshape(-1, 4, 2, 4, 2)
    for token, row in enumerate(codes, slot):
        places[:, token // 4, :, token % 4] = row.reshape(-1, 2, 2)


def write_v(tile: U8, slot: int, codes: U8) -> None:
    places = tile.reshape(4, -1, 4, 2, 4, 2)
    for token, row in enumerate(codes, slot):
        places[token // 4, :, :, token % 4 // 2, :, token % 2] = row.reshape(-1, 4, 4)


def read_k(tile: U8) -> U8:
    """-> [16, head_dim]"""
    return tile.reshape(-1, 4, 2, 4, 2).transpose(1, 3, 0, 2, 4).reshape(TILE_TOKENS, -1)


def read_v(tile: U8) -> U8:
    return tile.reshape(4, -1, 4, 2, 4, 2).transpose(0, 3, 5, 1, 2, 4).reshape(TILE_TOKENS, -1)
