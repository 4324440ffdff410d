"""Where a token's K and V lie inside a block, whatever the format: the specification that the native kernels follow.

A layer's slice of a block is [num_kv_heads][block_size / 16][K tile | V tile]; that of a latent layer, which has one
vector a token, [block_size / 16][K tile].
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.errors import ConfigError
from octavo.kv_formats import bf16, f32

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]

TILE_TOKENS = 16
_CODECS: dict[str, ModuleType] = {"f32": f32, "bf16": bf16}


class KVSlice(Protocol):
    """What the layout needs to know of a layer (`kernels.ops.KVLayer` is one)."""

    @property
    def pool(self) -> U8: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def layer_offset(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def kv_format(self) -> str: ...
    @property
    def kind(self) -> str: ...


def codec(kv_format: str) -> ModuleType:
    """The module that defines a format."""
    if kv_format not in _CODECS:
        known = ", ".join(_CODECS)
        raise ConfigError(f"KV format {kv_format!r} is not one of {known}; choose one with --kv-cache-dtype")
    return _CODECS[kv_format]


def _tile(kv: KVSlice, block_id: int, head: int, tile_index: int) -> U8:
    """The bytes [K tile | V tile] of 16 tokens of one head, or the K tile of 16 latents: a view."""
    tile_bytes = (2 if kv.kind == "pair" else 1) * TILE_TOKENS * kv.head_dim * codec(kv.kv_format).ITEM_BYTES
    tiles_before = head * (kv.block_size // TILE_TOKENS) + tile_index
    start = block_id * kv.block_bytes + kv.layer_offset + tiles_before * tile_bytes
    return kv.pool[start : start + tile_bytes]


def write_token(kv: KVSlice, block_id: int, slot: int, k: F32, v: F32) -> None:
    """Write one token: k and v [num_kv_heads, head_dim] into slot [0, block_size) of a block."""
    form = codec(kv.kv_format)
    for head in range(kv.num_kv_heads):
        tile = _tile(kv, block_id, head, slot // TILE_TOKENS)
        k_bytes, v_bytes = np.split(tile, 2)
        k_tile, v_tile = form.decode_k(k_bytes).copy(), form.decode_v(v_bytes).copy()
        k_tile[slot % TILE_TOKENS], v_tile[slot % TILE_TOKENS] = k[head], v[head]
        k_bytes[:], v_bytes[:] = form.encode_k(k_tile), form.encode_v(v_tile)


def write_latent(kv: KVSlice, block_id: int, slot: int, latent: F32) -> None:
    """Write one token's latent [head_dim] into slot [0, block_size) of a block."""
    form = codec(kv.kv_format)
    tile = _tile(kv, block_id, 0, slot // TILE_TOKENS)
    tokens = form.decode_k(tile).copy()
    tokens[slot % TILE_TOKENS] = latent
    tile[:] = form.encode_k(tokens)


def read_tokens(kv: KVSlice, block_table: I32, num_tokens: int, first: int = 0) -> tuple[F32, F32]:
    """Tokens `first` to num_tokens of a sequence: K and V, each [num_kv_heads, num_tokens - first, head_dim].

    Entries of the table before the block of `first` are not read.
    """
    form = codec(kv.kv_format)
    skip = first // TILE_TOKENS * TILE_TOKENS
    k = np.empty((kv.num_kv_heads, num_tokens - skip, kv.head_dim), np.float32)
    v = np.empty_like(k)
    for start in range(skip, num_tokens, TILE_TOKENS):
        count, to = min(TILE_TOKENS, num_tokens - start), start - skip
        block_id, slot = int(block_table[start // kv.block_size]), start % kv.block_size
        for head in range(kv.num_kv_heads):
            k_bytes, v_bytes = np.split(_tile(kv, block_id, head, slot // TILE_TOKENS), 2)
            k[head, to : to + count] = form.decode_k(k_bytes)[:count]
            v[head, to : to + count] = form.decode_v(v_bytes)[:count]
    return k[:, first - skip :], v[:, first - skip :]


def read_latents(kv: KVSlice, block_table: I32, num_tokens: int) -> F32:
    """The first latents of a sequence: [num_tokens, head_dim]."""
    form = codec(kv.kv_format)
    tiles = []
    for start in range(0, num_tokens, TILE_TOKENS):
        block_id, slot = int(block_table[start // kv.block_size]), start % kv.block_size
        tiles.append(form.decode_k(_tile(kv, block_id, 0, slot // TILE_TOKENS)))
    return np.concatenate(tiles)[:num_tokens]
