"""K and V as 8-bit floats, 5 bits of exponent and 2 of fraction: up to 57344; an infinity stays one.

Tiles as in `quads`. The scale is 1, or the layer has one for each channel (`KVLayer.k_scales`, `v_scales`), and what is
stored is the value divided by it, and then, with some scales, turned (`hadamard`) and made up for errors (`feedback`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.kv_formats import quads
from octavo.kv_formats.small_float import E5M2

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


def write_k(tile: U8, slot: int, k: F32) -> None:
    """k [n, head_dim] of tokens slot, slot + 1, ... into the bytes of a K tile."""
    quads.write_k(tile, slot, E5M2.encode(k))


def write_v(tile: U8, slot: int, v: F32) -> None:
    """v [n, head_dim] of tokens slot, slot + 1, ... into the bytes of a V tile."""
    quads.write_v(tile, slot, E5M2.encode(v))


def decode_k(tile: U8) -> F32:
    """The bytes of a K tile -> [16, head_dim]."""
    return E5M2.decode(quads.read_k(tile))


def decode_v(tile: U8) -> F32:
    """The bytes of a V tile -> [16, head_dim]."""
    return E5M2.decode(quads.read_v(tile))
