"""Sequences in a pool of blocks whose unused slots are poisoned, and paged attention on chosen rows of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.kernels.ops import F32, I32, AttentionBatch, KVLayer, Ops
from octavo.kv_formats import layout

POISONS = (np.nan, np.inf, -np.inf)


@dataclass(frozen=True)
class Geometry:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_format: str = "f32"
    block_size: int = 16


@dataclass(frozen=True)
class Stored:
    """One sequence: its query rows, its K and V as given, and the blocks that hold them."""

    q: F32  # [num_tokens, num_heads, head_dim]
    k: F32  # [num_kv_heads, num_tokens, head_dim]
    v: F32
    blocks: list[int]


@dataclass(frozen=True)
class Piece:
    """Rows [first, end) of a sequence, to be computed in one call with others."""

    sequence: Stored
    first: int
    end: int


def random_sequence(geometry: Geometry, num_tokens: int, seed: int) -> tuple[F32, F32, F32]:
    """q, k, v of normal data; q has deviation 2, so that the weights are far from equal."""
    rng = np.random.default_rng(seed)
    q = 2 * rng.standard_normal((num_tokens, geometry.num_heads, geometry.head_dim), np.float32)
    k = rng.standard_normal((geometry.num_kv_heads, num_tokens, geometry.head_dim), np.float32)
    v = rng.standard_normal((geometry.num_kv_heads, num_tokens, geometry.head_dim), np.float32)
    return q, k, v


class Pool:
    """A layer's pool. Every slot holds `poison` until a sequence is stored there."""

    def __init__(self, geometry: Geometry, num_blocks: int, *, poison: float = np.nan, seed: int = 0) -> None:
        self.geometry = geometry
        item_bytes = layout.codec(geometry.kv_format).ITEM_BYTES
        layer_bytes = 2 * geometry.block_size * geometry.num_kv_heads * geometry.head_dim * item_bytes
        block_bytes = 3 * layer_bytes  # this layer lies between two others
        memory = np.zeros(num_blocks * block_bytes + 64, np.uint8)
        offset = -memory.ctypes.data % 64
        pool = memory[offset : offset + num_blocks * block_bytes]
        self.kv = KVLayer(
            pool,
            block_bytes,
            layer_bytes,
            geometry.block_size,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.kv_format,
        )
        self.poison = poison
        self._free = [int(block) for block in np.random.default_rng(seed).permutation(num_blocks)]
        tile = np.full((layout.TILE_TOKENS, geometry.head_dim), poison, np.float32)
        form = layout.codec(geometry.kv_format)
        pool.reshape(-1, tile.size * item_bytes)[...] = form.encode_k(tile)

    def add(self, q: F32, k: F32, v: F32) -> Stored:
        """Store a sequence in free blocks, in no particular order of block ids."""
        size, tokens = self.geometry.block_size, layout.TILE_TOKENS
        num_tokens, form = k.shape[1], layout.codec(self.geometry.kv_format)
        blocks = [self._free.pop() for _ in range(-(-num_tokens // size))]
        tile_bytes = 2 * tokens * self.geometry.head_dim * form.ITEM_BYTES
        for start in range(0, num_tokens, tokens):
            count = min(tokens, num_tokens - start)
            for head in range(self.geometry.num_kv_heads):
                at = blocks[start // size] * self.kv.block_bytes + self.kv.layer_offset
                at += (head * (size // tokens) + start % size // tokens) * tile_bytes
                padded = np.full((2, tokens, self.geometry.head_dim), self.poison, np.float32)
                padded[0, :count], padded[1, :count] = k[head, start : start + count], v[head, start : start + count]
                whole = np.concatenate([form.encode_k(padded[0]), form.encode_v(padded[1])])
                self.kv.pool[at : at + tile_bytes] = whole
        return Stored(q, k, v, blocks)


def batch_of(pieces: Sequence[Piece], padding: int = 2) -> AttentionBatch:
    """The batch of some pieces; the block tables end with entries that must not be read as positions."""
    lengths = [piece.end - piece.first for piece in pieces]
    table = np.zeros((len(pieces), padding + max(len(piece.sequence.blocks) for piece in pieces)), np.int32)
    for row, piece in zip(table, pieces, strict=True):
        row[: len(piece.sequence.blocks)] = piece.sequence.blocks
    starts: I32 = np.array([piece.first for piece in pieces], np.int32)
    return AttentionBatch(np.cumsum([0, *lengths], dtype=np.int32), starts, table[None])


def attend(ops: Ops, pool: Pool, pieces: Sequence[Piece], scale: float | None = None) -> F32:
    """Paged attention of the pieces in one call: [rows, num_heads, head_dim]."""
    q = np.concatenate([piece.sequence.q[piece.first : piece.end] for piece in pieces])
    out = np.full_like(q, 123.0)
    scale = pool.geometry.head_dim**-0.5 if scale is None else scale
    ops.paged_attention(q, batch_of(pieces), pool.kv, scale, out)
    return out


def attend_in_chunks(ops: Ops, pool: Pool, sequence: Stored, chunk: int) -> F32:
    """All rows of a sequence, `chunk` rows a call."""
    n = len(sequence.q)
    starts = range(0, n, chunk)
    return np.concatenate([attend(ops, pool, [Piece(sequence, i, min(i + chunk, n))]) for i in starts])


def attention_f64(pool: Pool, sequence: Stored, row: int, scale: float) -> np.ndarray:
    """One row in double precision, on K and V as stored."""
    form = layout.codec(pool.geometry.kv_format)
    round_trip = getattr(form, "round_trip", lambda x: x)
    k, v = round_trip(sequence.k).astype(np.float64), round_trip(sequence.v).astype(np.float64)
    q = sequence.q[row].astype(np.float64).reshape(pool.geometry.num_kv_heads, -1, pool.geometry.head_dim)
    scores = scale * np.einsum("hgd,hnd->hgn", q, k[:, : row + 1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hgn,hnd->hgd", weights, v[:, : row + 1]).reshape(pool.geometry.num_heads, -1)
