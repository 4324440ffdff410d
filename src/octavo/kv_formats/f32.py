"""K and V as float32, 16 tokens of one head to a tile. K: [head_dim][16]; V: [16][head_dim]."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

TILE_TOKENS = 16
ITEM_BYTES = 4


def encode_k(k: F32) -> U8:
    """k [16, head_dim] -> the bytes of a K tile."""
    return np.ascontiguousarray(k.T, np.float32).view(np.uint8).reshape(-1)


def encode_v(v: F32) -> U8:
    """v [16, head_dim] -> the bytes of a V tile."""
    return np.ascontiguousarray(v, np.float32).view(np.uint8).reshape(-1)


def decode_k(tile: U8) -> F32:
    """The bytes of a K tile -> [16, head_dim]."""
    return tile.view(np.float32).reshape(-1, TILE_TOKENS).T


def decode_v(tile: U8) -> F32:
    """The bytes of a V tile -> [16, head_dim]."""
    return tile.view(np.float32).reshape(TILE_TOKENS, -1)
