"""Both in 4 bits, as in KIVI (2024): K by channel, over a tile of 16 tokens; V by token, as in `k8v4`.

A channel of a tile of K has a bfloat16 scale and minimum, as a token of V has: minimum = smallest value, scale =
bfloat16((largest - smallest) / 15); code = (value - minimum) / scale, to the nearest, ties to even, within 0 to 15.
Decoded: bfloat16(scale * code + minimum). K is rounded to bfloat16 first: so it waits for its tile to fill (the tail).

A K tile: codes, head_dim scales, head_dim minima; codes are [head_dim / 8][16][4]: eight dimensions of a token to a
word, dimensions d (low bits) and d + 4 of each 8 to a byte.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.core.kv_bytes import TILE_TOKENS
from octavo.kv_formats import bf16, k8v4

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


write_v = k8v4.write_v
decode_v = k8v4.decode_v


def write_k(tile: U8, slot: int, k: F32) -> None:
    """k [16, head_dim]: a whole tile, at once."""
    assert (slot, len(k)) == (0, TILE_TOKENS), "K is quantised by whole tiles"
    codes, scales, minima = k8v4.encode(bf16.round_trip(k).T)  # [head_dim, 16], [head_dim]
    head_dim = len(codes)
    halves = codes.T.reshape(TILE_TOKENS, head_dim // 8, 2, 4)  # [16, head_dim / 8, low or high bits, 4]
    places = tile[: 8 * head_dim].reshape(head_dim // 8, TILE_TOKENS, 4)
    places[...] = (halves[:, :, 0] | halves[:, :, 1] << 4).transpose(1, 0, 2)
    tile[8 * head_dim :].view(np.uint16).reshape(2, head_dim)[...] = scales, minima


def decode_k(tile: U8) -> F32:
    """The bytes of a K tile -> [16, head_dim]."""
    head_dim = len(tile) // 12
    packed = tile[: 8 * head_dim].reshape(head_dim // 8, TILE_TOKENS, 4).transpose(1, 0, 2)
    codes = np.stack([packed & 15, packed >> 4], axis=2).reshape(TILE_TOKENS, head_dim)
    scales, minima = tile[8 * head_dim :].view(np.uint16).reshape(2, head_dim)
    return np.ascontiguousarray(k8v4.decode(codes.T, scales, minima).T)
