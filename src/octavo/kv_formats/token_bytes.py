"""Moving the stored K and V of single tokens from block to block, byte by byte: nothing is decoded or rounded again.

Which bytes of a tile belong to a token is found out from the format's codec. Formats in which tokens share bytes (a
scale of a whole block, two tokens to a byte) cannot be moved so. It does not know why tokens are moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.core.kv_bytes import TILE_TOKENS
from octavo.errors import ConfigError
from octavo.kv_formats.layout import KVSlice, codec, tile_bytes

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
Units = npt.NDArray[Any]  # unsigned integers of 1, 2 or 4 bytes


@dataclass(frozen=True, slots=True)
class TilePart:
    """The K or V part of a tile, as unsigned integers that belong to one token each."""

    unit: np.dtype[Any]
    places: I64  # [16, n]: where the units of each token stand, counted in units from the start of the tile


class TokenMover:
    """For layers of one geometry and format. Raises ConfigError for a format in which tokens share bytes."""

    def __init__(self, kv: KVSlice) -> None:
        self._parts = [part for part in _parts(kv.kv_format, kv.head_dim, tile_bytes(kv)) if part is not None]

    def gather(self, kv: KVSlice, table: I32, slots: I64) -> list[Units]:
        """The bytes of `slots` [num_kv_heads, n] of a sequence, in no order that anybody but `scatter` knows."""
        return [self._pool(kv, part).take(self._indices(kv, part, table, slots)) for part in self._parts]

    def scatter(self, kv: KVSlice, table: I32, slots: I64, units: list[Units]) -> None:
        """Write what `gather` gave to `slots` of this sequence."""
        for part, values in zip(self._parts, units, strict=True):
            self._pool(kv, part)[self._indices(kv, part, table, slots)] = values

    @staticmethod
    def _pool(kv: KVSlice, part: TilePart) -> Units:
        return kv.pool.view(part.unit)

    @staticmethod
    def _indices(kv: KVSlice, part: TilePart, table: I32, slots: I64) -> I64:
        """[num_kv_heads, n, units of a token]"""
        tiles, inside = kv.block_size // TILE_TOKENS, slots % kv.block_size
        heads = np.arange(len(slots))[:, None] * tiles
        starts = table[slots // kv.block_size].astype(np.int64) * kv.block_bytes + kv.layer_offset
        starts += (heads + inside // TILE_TOKENS) * sum(tile_bytes(kv))
        return starts[..., None] // part.unit.itemsize + part.places[slots % TILE_TOKENS]


def _parts(kv_format: str, head_dim: int, num_bytes: tuple[int, int]) -> tuple[TilePart, TilePart | None]:
    form = codec(kv_format)
    k = _part(kv_format, form.write_k, head_dim, num_bytes[0], 0)
    return k, _part(kv_format, form.write_v, head_dim, num_bytes[1], num_bytes[0]) if num_bytes[1] else None


def _part(kv_format: str, write: Any, head_dim: int, num_bytes: int, offset: int) -> TilePart:
    """A byte is a token's if writing the token decides it, whatever was there."""
    numbers = np.linspace(-1, 1, head_dim, dtype=np.float32)[None]
    owned = np.zeros((TILE_TOKENS, num_bytes), bool)
    for token in range(TILE_TOKENS):
        tiles = [np.full(num_bytes, fill, np.uint8) for fill in (0, 255)]
        for tile in tiles:
            write(tile, token, numbers)
        owned[token] = tiles[0] == tiles[1]
    if not (owned.sum(axis=0) == 1).all() or len(set(owned.sum(axis=1).tolist())) != 1:
        raise ConfigError(
            f"tokens of the KV format {kv_format!r} share bytes, so they cannot be kept one by one; take another "
            "--kv-cache-dtype, or a kv_policy that drops whole blocks (streaming) or nothing (all)"
        )
    size = max(size for size in (1, 2, 4) if offset % size == 0 and _is_whole(owned, size))
    places = np.nonzero(owned[:, ::size])[1].reshape(TILE_TOKENS, -1) + offset // size
    return TilePart(np.dtype(f"u{size}"), places.astype(np.int64))


def _is_whole(owned: npt.NDArray[np.bool_], size: int) -> bool:
    """Whether units of so many bytes belong to one token each."""
    if owned.shape[1] % size:
        return False
    units = owned.reshape(TILE_TOKENS, -1, size)
    return bool((units.all(axis=2) == units.any(axis=2)).all())
