"""Where a token's K and V lie inside a block, whatever the format: the specification that the native kernels follow.

A layer's slice of a block is [num_kv_heads][block_size / 16][K tile | V tile]; that of a latent layer, which has one
vector a token, [block_size / 16][K tile]. Where K is quantised by whole tiles, its layer has a tail beside it,
[num_kv_heads][block_size / 16][K tile] in the tail's format: K of a row's own tile is read there. What a layer does
with K and V before its format rounds them (scales, then the turn of `hadamard`) is undone when they are read.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.core.kv_bytes import TILE_TOKENS, format_bytes
from octavo.errors import ConfigError
from octavo.kv_formats import bf16, f16, f32, feedback, fp8_e4m3, fp8_e5m2, hadamard, int4, int8, k8v4

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]


class Codec(Protocol):
    """What the module of a format defines; x is [n, head_dim], a tile's bytes are those of K or of V alone."""

    def write_k(self, tile: U8, slot: int, k: F32) -> None: ...
    def write_v(self, tile: U8, slot: int, v: F32) -> None: ...
    def decode_k(self, tile: U8) -> F32: ...
    def decode_v(self, tile: U8) -> F32: ...


_CODECS: dict[str, Codec] = {
    "f32": f32,
    "bf16": bf16,
    "f16": f16,
    "fp8_e4m3": fp8_e4m3,
    "fp8_e5m2": fp8_e5m2,
    "int8": int8,
    "k8v4": k8v4,
    "int4": int4,
}


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
    @property
    def k_scales(self) -> F32 | None: ...
    @property
    def v_scales(self) -> F32 | None: ...
    @property
    def k_means(self) -> F32 | None: ...
    @property
    def k_feedback(self) -> F32 | None: ...
    @property
    def is_turned(self) -> bool: ...
    @property
    def tail(self) -> KVSlice | None: ...


def codec(kv_format: str) -> Codec:
    """The module that defines a format."""
    if kv_format not in _CODECS:
        known = ", ".join(_CODECS)
        raise ConfigError(f"KV format {kv_format!r} is not one of {known}; choose one with --kv-cache-dtype")
    return _CODECS[kv_format]


def tile_bytes(kv: KVSlice) -> tuple[int, int]:
    """Bytes of a K tile and of a V tile; a latent layer, and a tail, has no V tiles."""
    found = format_bytes(kv.kv_format, kv.head_dim)
    return TILE_TOKENS * found.k.of(kv.head_dim), TILE_TOKENS * found.v.of(kv.head_dim) if kv.kind == "pair" else 0


def _tile(kv: KVSlice, block_id: int, head: int, tile_index: int) -> tuple[U8, U8]:
    """The K tile and the V tile of 16 tokens of one head: views."""
    k_bytes, v_bytes = tile_bytes(kv)
    tiles_before = head * (kv.block_size // TILE_TOKENS) + tile_index
    start = block_id * kv.block_bytes + kv.layer_offset + tiles_before * (k_bytes + v_bytes)
    return kv.pool[start : start + k_bytes], kv.pool[start + k_bytes : start + k_bytes + v_bytes]


def write_token(kv: KVSlice, block_id: int, slot: int, k: F32, v: F32, tail_id: int = 0) -> None:
    """Write one token: k and v [num_kv_heads, head_dim] into slot [0, block_size) of a block.

    With a tail, K goes to the same slot of block `tail_id` of that; the last slot of a tile quantises the tile.
    """
    form = codec(kv.kv_format)
    if kv.k_means is not None:
        k = k - kv.k_means
    if kv.k_scales is not None and kv.v_scales is not None:
        k, v = k / kv.k_scales, v / kv.v_scales
    k, v = _turned(kv, k, v)
    if kv.k_feedback is not None:
        k = feedback.compensate(k, kv.k_feedback, feedback.FLOATS[kv.kv_format])
    for head in range(kv.num_kv_heads):
        k_tile, v_tile = _tile(kv, block_id, head, slot // TILE_TOKENS)
        if kv.tail is None:
            form.write_k(k_tile, slot % TILE_TOKENS, k[head : head + 1])
        else:
            tail_tile, _ = _tile(kv.tail, tail_id, head, slot // TILE_TOKENS)
            codec(kv.tail.kv_format).write_k(tail_tile, slot % TILE_TOKENS, k[head : head + 1])
            if slot % TILE_TOKENS == TILE_TOKENS - 1:
                form.write_k(k_tile, 0, codec(kv.tail.kv_format).decode_k(tail_tile))
        form.write_v(v_tile, slot % TILE_TOKENS, v[head : head + 1])


def _turned(kv: KVSlice, k: F32, v: F32) -> tuple[F32, F32]:
    """There and back again. K that is rounded by whole tiles, channel by channel, is not turned."""
    if not kv.is_turned:
        return k, v
    return k if kv.tail is not None else hadamard.turn(k), hadamard.turn(v)


def write_latent(kv: KVSlice, block_id: int, slot: int, latent: F32) -> None:
    """Write one token's latent [head_dim] into slot [0, block_size) of a block."""
    tile, _ = _tile(kv, block_id, 0, slot // TILE_TOKENS)
    codec(kv.kv_format).write_k(tile, slot % TILE_TOKENS, latent[None])


def read_tokens(
    kv: KVSlice, block_table: I32, num_tokens: int, first: int = 0, tail_table: I32 | None = None
) -> tuple[F32, F32]:
    """Tokens `first` to num_tokens of a sequence: K and V, each [num_kv_heads, num_tokens - first, head_dim].

    Entries of the table before the block of `first` are not read. With a tail, K of the last tile is read there: it is
    what the row of the last token sees.
    """
    form = codec(kv.kv_format)
    skip = first // TILE_TOKENS * TILE_TOKENS
    k = np.empty((kv.num_kv_heads, num_tokens - skip, kv.head_dim), np.float32)
    v = np.empty_like(k)
    for start in range(skip, num_tokens, TILE_TOKENS):
        count, to = min(TILE_TOKENS, num_tokens - start), start - skip
        block_id, slot = int(block_table[start // kv.block_size]), start % kv.block_size
        for head in range(kv.num_kv_heads):
            k_tile, v_tile = _tile(kv, block_id, head, slot // TILE_TOKENS)
            k[head, to : to + count] = form.decode_k(k_tile)[:count]
            v[head, to : to + count] = form.decode_v(v_tile)[:count]
            if kv.tail is not None and start + TILE_TOKENS >= num_tokens:
                assert tail_table is not None
                tail_id = int(tail_table[start // kv.block_size])
                tail_tile, _ = _tile(kv.tail, tail_id, head, slot // TILE_TOKENS)
                k[head, to : to + count] = codec(kv.tail.kv_format).decode_k(tail_tile)[:count]
    k, v = _turned(kv, k, v)
    if kv.k_scales is not None and kv.v_scales is not None:
        k, v = k * kv.k_scales[:, None], v * kv.v_scales[:, None]
    if kv.k_means is not None:
        k = k + kv.k_means[:, None]
    return k[:, first - skip :], v[:, first - skip :]


def read_latents(kv: KVSlice, block_table: I32, num_tokens: int) -> F32:
    """The first latents of a sequence: [num_tokens, head_dim]."""
    form = codec(kv.kv_format)
    tiles = []
    for start in range(0, num_tokens, TILE_TOKENS):
        block_id, slot = int(block_table[start // kv.block_size]), start % kv.block_size
        tiles.append(form.decode_k(_tile(kv, block_id, 0, slot // TILE_TOKENS)[0]))
    return np.concatenate(tiles)[:num_tokens]
