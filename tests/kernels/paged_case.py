"""Sequences in a pool of blocks whose unused slots are poisoned, and paged attention on chosen rows of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from octavo.core.kv_bytes import FORMAT_BYTES, vector_bytes
from octavo.kernels.native import supported_instruction_sets
from octavo.kernels.ops import F32, I32, AttentionBatch, KVLayer, Ops
from octavo.kv_formats import hadamard, layout

FORMATS = tuple(FORMAT_BYTES)
INSTRUCTION_SETS = supported_instruction_sets()
# By default every format on the best instruction set, and one of each way of computing on the others.
CASES = [
    pytest.param(instruction_set, kv_format)
    if instruction_set == INSTRUCTION_SETS[0] or kv_format in ("bf16", "int8", "int4")
    else pytest.param(instruction_set, kv_format, marks=pytest.mark.large)
    for instruction_set in INSTRUCTION_SETS
    for kv_format in FORMATS
]
# The same for tests that have many parameters besides.
FEW_CASES = [
    pytest.param(*case.values, marks=case.marks)
    if case.values in ((INSTRUCTION_SETS[0], "bf16"), (INSTRUCTION_SETS[0], "int8"), ("portable", "f32"))
    else pytest.param(*case.values, marks=pytest.mark.large)
    for case in CASES
]
cases = pytest.mark.parametrize(("instruction_set", "kv_format"), CASES)
few_cases = pytest.mark.parametrize(("instruction_set", "kv_format"), FEW_CASES)
# Latents are not kept in formats that quantise whole tiles.
latent_cases, few_latent_cases = (
    pytest.mark.parametrize(
        ("instruction_set", "kv_format"), [case for case in some if FORMAT_BYTES[case.values[1]].tail_format is None]
    )
    for some in (CASES, FEW_CASES)
)
POISONS = (np.nan, np.inf, -np.inf)


@dataclass(frozen=True)
class Geometry:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_format: str = "f32"
    block_size: int = 16


def holds(kv_format: str, head_dim: int) -> bool:
    """Whether heads of this size can be stored in this format."""
    return head_dim % FORMAT_BYTES[kv_format].dim_step == 0


def tolerance(instruction_set: str, kv_format: str, *, is_latent: bool = False) -> float:
    """Where bf16 pairs are multiplied, q and the weights are rounded to bf16; elsewhere everything is f32.

    Codes with scales are multiplied as whole numbers there, a query or weights in 8 bits (test_byte_attention.py).
    """
    if instruction_set != "avx512_bf16" or kv_format in ("f32", "f16"):
        return 1e-5
    return 6e-2 if kv_format in ("int8", "k8v4", "int4") and not is_latent else 3e-2


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

    def __init__(
        self,
        geometry: Geometry,
        num_blocks: int,
        *,
        poison: float = np.nan,
        seed: int = 0,
        scales: tuple[F32, F32] | None = None,
        is_turned: bool = False,
        k_means: F32 | None = None,
        k_feedback: F32 | None = None,
    ) -> None:
        self.geometry = geometry
        token_bytes = geometry.num_kv_heads * vector_bytes(geometry.kv_format, geometry.head_dim)
        layer_bytes = geometry.block_size * token_bytes
        tail_format = FORMAT_BYTES[geometry.kv_format].tail_format
        tail_bytes = 0  # the tail lies in the blocks of the same ids, behind the layers
        if tail_format is not None:
            tail_token = geometry.num_kv_heads * vector_bytes(tail_format, geometry.head_dim, "tail")
            tail_bytes = geometry.block_size * tail_token
        block_bytes = 3 * layer_bytes + tail_bytes  # this layer lies between two others
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
            k_scales=scales[0] if scales else None,
            v_scales=scales[1] if scales else None,
            is_turned=is_turned,
            k_means=k_means,
            k_feedback=k_feedback,
        )
        if tail_format is not None:
            tail = replace(self.kv, layer_offset=3 * layer_bytes, kv_format=tail_format, group=1, kind="tail")
            self.kv = replace(self.kv, tail=tail)
        self.poison = poison
        self._free = [int(block) for block in np.random.default_rng(seed).permutation(num_blocks)]
        tile = np.full((layout.TILE_TOKENS, geometry.head_dim), poison, np.float32)
        whole = self._encode(tile, tile)
        blocks = pool.reshape(num_blocks, block_bytes)
        blocks[:, : 3 * layer_bytes] = np.tile(whole, 3 * layer_bytes // len(whole))
        if tail_bytes:
            bits = self._encode_tail(tile)
            blocks[:, 3 * layer_bytes :] = np.tile(bits, tail_bytes // len(bits))

    def _encode(self, k: F32, v: F32) -> np.ndarray:
        """The bytes [K tile | V tile] of 16 tokens."""
        form, (k_bytes, v_bytes) = layout.codec(self.geometry.kv_format), layout.tile_bytes(self.kv)
        whole = np.zeros(k_bytes + v_bytes, np.uint8)
        form.write_k(whole[:k_bytes], 0, k)
        form.write_v(whole[k_bytes:], 0, v)
        return whole

    def _encode_tail(self, k: F32) -> np.ndarray:
        tail = self.kv.tail
        assert tail is not None
        whole = np.zeros(layout.tile_bytes(tail)[0], np.uint8)
        layout.codec(tail.kv_format).write_k(whole, 0, k)
        return whole

    def unused_block(self) -> int:
        """A block that still holds poison."""
        return self._free[0]

    def add(self, q: F32, k: F32, v: F32) -> Stored:
        """Store a sequence in free blocks, in no particular order of block ids."""
        size, tokens = self.geometry.block_size, layout.TILE_TOKENS
        num_tokens = k.shape[1]
        blocks = [self._free.pop() for _ in range(-(-num_tokens // size))]
        tile_bytes = sum(layout.tile_bytes(self.kv))
        if self.kv.k_means is not None:
            k = k - self.kv.k_means[:, None]
        if self.kv.k_scales is not None and self.kv.v_scales is not None:
            k, v = k / self.kv.k_scales[:, None], v / self.kv.v_scales[:, None]
        if self.kv.is_turned:
            k, v = k if self.kv.tail is not None else hadamard.turn(k), hadamard.turn(v)
        for start in range(0, num_tokens, tokens):
            count = min(tokens, num_tokens - start)
            for head in range(self.geometry.num_kv_heads):
                at = blocks[start // size] * self.kv.block_bytes + self.kv.layer_offset
                at += (head * (size // tokens) + start % size // tokens) * tile_bytes
                padded = np.full((2, tokens, self.geometry.head_dim), self.poison, np.float32)
                padded[0, :count], padded[1, :count] = k[head, start : start + count], v[head, start : start + count]
                self.kv.pool[at : at + tile_bytes] = self._encode(padded[0], padded[1])
                if self.kv.tail is not None:
                    bits = self._encode_tail(padded[0])
                    at = blocks[start // size] * self.kv.block_bytes + self.kv.tail.layer_offset
                    at += (head * (size // tokens) + start % size // tokens) * len(bits)
                    self.kv.pool[at : at + len(bits)] = bits
        return Stored(q, k, v, blocks)


@dataclass(frozen=True)
class Options:
    """What a model's attention may have beside its scale."""

    window: int = 0
    softcap: float = 0.0
    sinks: tuple[float, ...] | None = None

    def arguments(self) -> dict[str, object]:
        sinks = None if self.sinks is None else np.array(self.sinks, np.float32)
        return {"window": self.window, "softcap": self.softcap, "sinks": sinks}


PLAIN = Options()


def batch_of(pieces: Sequence[Piece], padding: int = 2) -> AttentionBatch:
    """The batch of some pieces; the block tables end with entries that must not be read as positions."""
    lengths = [piece.end - piece.first for piece in pieces]
    table = np.zeros((len(pieces), padding + max(len(piece.sequence.blocks) for piece in pieces)), np.int32)
    for row, piece in zip(table, pieces, strict=True):
        row[: len(piece.sequence.blocks)] = piece.sequence.blocks
    starts: I32 = np.array([piece.first for piece in pieces], np.int32)
    return AttentionBatch(np.cumsum([0, *lengths], dtype=np.int32), starts, np.stack([table, table]))


def forget_passed_blocks(batch: AttentionBatch, pool: Pool, window: int) -> None:
    """Blocks that the window has passed are gone: their entries name a block that holds poison. So are full tails."""
    size = pool.geometry.block_size
    for first, row, tail in zip(batch.start_position, *batch.block_tables, strict=True):
        if window:
            row[: max(0, int(first) - window + 1) // size] = pool.unused_block()
        if pool.kv.tail is not None:
            tail[: int(first) // size] = pool.unused_block()


def attend(ops: Ops, pool: Pool, pieces: Sequence[Piece], scale: float | None = None, options: Options = PLAIN) -> F32:
    """Paged attention of the pieces in one call: [rows, num_heads, head_dim]."""
    q = np.concatenate([piece.sequence.q[piece.first : piece.end] for piece in pieces])
    out = np.full_like(q, 123.0)
    scale = pool.geometry.head_dim**-0.5 if scale is None else scale
    batch = batch_of(pieces)
    if options.window or pool.kv.tail is not None:
        forget_passed_blocks(batch, pool, options.window)
    ops.paged_attention(q, batch, pool.kv, scale, out, **options.arguments())  # type: ignore[arg-type]
    return out


def attend_in_chunks(ops: Ops, pool: Pool, sequence: Stored, chunk: int, options: Options = PLAIN) -> F32:
    """All rows of a sequence, `chunk` rows a call."""
    n = len(sequence.q)
    pieces = [Piece(sequence, i, min(i + chunk, n)) for i in range(0, n, chunk)]
    return np.concatenate([attend(ops, pool, [piece], options=options) for piece in pieces])


def decode(ops: Ops, pool: Pool, sequence: Stored, options: Options = PLAIN) -> F32:
    """Every row as a sequence of one row."""
    return attend(ops, pool, [Piece(sequence, row, row + 1) for row in range(len(sequence.q))], options=options)


def assert_same_bits(found: F32, expected: F32) -> None:
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


def attention_f64(pool: Pool, sequence: Stored, row: int, scale: float) -> np.ndarray:
    """One row in double precision, on K and V as stored."""
    table = np.array(sequence.blocks, np.int32)
    k32, v32 = layout.read_tokens(pool.kv, table, row + 1, tail_table=table)
    k, v = k32.astype(np.float64), v32.astype(np.float64)
    q = sequence.q[row].astype(np.float64).reshape(pool.geometry.num_kv_heads, -1, pool.geometry.head_dim)
    scores = scale * np.einsum("hgd,hnd->hgn", q, k)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hgn,hnd->hgd", weights, v).reshape(pool.geometry.num_heads, -1)
