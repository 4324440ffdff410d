"""K and V as float32, 16 tokens of one head to a tile. K: [head_dim][16]; V: [16][head_dim]."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.core.kv_bytes import TILE_TOKENS

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


def write_k(tile: U8, slot: int, k: F32) -> None:
    """k [n, head_dim] of tokens slot, slot + 1, ... into the bytes of a K tile."""
    tile.view(np.float32).reshape(-1, TILE_TOKENS)[:, slot : slot + len(k)] = k.T


def write_v(tile: U8, slot: int, v: F32) -> None:
    """v [n, head_dim] of tokens slot, slot + 1, ... into the bytes of a V tile."""
    tile.view(np.float32).reshape(TILE_TOKENS, -1)[slot : slot + len(v)] = v


def decode_k(tile: U8) -> F32:
    """The bytes of a K tile -> [16, head_dim]."""
    return tile.view(np.float32).reshape(-1, TILE_TOKENS).T


def decode_v(tile: U8) -> F32:
    """The bytes of a V tile -> [16, head_dim]."""
    return tile.view(np.float32).reshape(TILE_TOKENS, -1)
