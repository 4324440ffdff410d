"""Latents: written as the codec says, attended as reference.py says, and law 1 for their rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from octavo.core.kv_bytes import vector_bytes
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32, AttentionBatch, KVLayer, Ops
from octavo.kernels.reference import ReferenceOps
from octavo.kv_formats import layout
from tests.kernels.paged_case import (
    INSTRUCTION_SETS,
    POISONS,
    Geometry,
    Pool,
    assert_same_bits,
    few_latent_cases,
    holds,
    latent_cases,
    random_sequence,
    tolerance,
)

instruction_sets = pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)


@dataclass(frozen=True)
class Latents:
    """One sequence in a pool that holds poison elsewhere."""

    q: F32  # [num_tokens, num_heads, dim]
    values: F32  # [num_tokens, dim]
    kv: KVLayer
    blocks: np.ndarray
    rank: int

    def batch(self, rows: list[tuple[int, int]]) -> AttentionBatch:
        """Rows [first, end), each range as a sequence of its own."""
        lengths = [end - first for first, end in rows]
        starts = np.array([first for first, _ in rows], np.int32)
        return AttentionBatch(
            np.cumsum([0, *lengths], dtype=np.int32), starts, np.tile(self.blocks, (1, len(rows), 1)).astype(np.int32)
        )

    def attend(self, ops: Ops, rows: list[tuple[int, int]]) -> F32:
        q = np.concatenate([self.q[first:end] for first, end in rows])
        out = np.full((len(q), q.shape[1], self.rank), 9.0, np.float32)
        ops.latent_attention(q, self.batch(rows), self.kv, self.rank, q.shape[2] ** -0.5, out)
        return out


def latents(
    kv_format: str, num_tokens: int, *, num_heads: int = 5, rank: int = 48, rope: int = 16, poison: float = np.nan
) -> Latents:
    rng = np.random.default_rng(num_tokens)
    dim, block_size = rank + rope, 32
    num_blocks = -(-num_tokens // block_size) + 2
    layer_bytes = block_size * vector_bytes(kv_format, dim, "latent")
    tile = np.zeros(16 * vector_bytes(kv_format, dim, "latent"), np.uint8)
    layout.codec(kv_format).write_k(tile, 0, np.full((16, dim), poison, np.float32))
    pool = np.tile(tile, num_blocks * 3 * block_size // 16)
    kv = KVLayer(pool, 3 * layer_bytes, layer_bytes, block_size, 1, dim, kv_format, kind="latent")
    values = rng.standard_normal((num_tokens, dim), np.float32)
    q = 2 * rng.standard_normal((num_tokens, num_heads, dim), np.float32)
    made = Latents(q, values, kv, rng.permutation(num_blocks)[: num_blocks - 2], rank)
    ReferenceOps().latent_write(values, made.batch([(0, num_tokens)]), kv)
    return made


@latent_cases
@pytest.mark.parametrize(
    ("num_heads", "rank", "rope"), [(5, 48, 16), (16, 512, 64), (1, 16, 16), (40, 64, 32), (3, 32, 0)]
)
def test_against_the_reference(instruction_set: str, kv_format: str, num_heads: int, rank: int, rope: int) -> None:
    if not holds(kv_format, rank + rope):
        pytest.skip("latents of this size are refused")
    made = latents(kv_format, 300, num_heads=num_heads, rank=rank, rope=rope)
    rows = [(0, 1), (0, 10), (255, 265), (299, 300)]
    found, expected = made.attend(NativeOps(2, instruction_set), rows), made.attend(ReferenceOps(), rows)
    assert np.abs(found - expected).max() < 2 * tolerance(instruction_set, kv_format, is_latent=True)


@few_latent_cases
@pytest.mark.parametrize("num_heads", [3, 16, 40])
def test_a_row_has_the_same_bits_in_every_chunk_batch_and_number_of_threads(
    instruction_set: str, kv_format: str, num_heads: int
) -> None:
    made = latents(kv_format, 601, num_heads=num_heads)
    one, two, four = (NativeOps(n, instruction_set) for n in (1, 2, 4))
    expected = made.attend(one, [(row, row + 1) for row in range(601)])
    for chunk in (7, 64, 100, 601):
        rows = [(first, min(first + chunk, 601)) for first in range(0, 601, chunk)]
        assert_same_bits(np.concatenate([made.attend(two, [part]) for part in rows]), expected)
        assert_same_bits(made.attend(four, rows), expected)
    for row in (0, 15, 255, 256, 600):
        assert_same_bits(made.attend(four, [(row, row + 1)])[0], expected[row])


@latent_cases
def test_few_rows_of_a_long_context_are_cut_along_the_keys(instruction_set: str, kv_format: str) -> None:
    made = latents(kv_format, 3000)
    one, four = NativeOps(1, instruction_set), NativeOps(4, instruction_set)
    expected = made.attend(one, [(2900, 3000)])
    for length in (1, 2, 16, 17):
        assert_same_bits(made.attend(four, [(2950, 2950 + length)]), expected[50 : 50 + length])


@latent_cases
def test_unused_slots_and_later_tokens_never_matter(instruction_set: str, kv_format: str) -> None:
    ops, clean = NativeOps(2, instruction_set), latents(kv_format, 300, poison=0.0)
    expected = clean.attend(ops, [(0, 300)])
    assert np.isfinite(expected).all()
    for poison in POISONS:
        assert_same_bits(latents(kv_format, 300, poison=poison).attend(ops, [(0, 300)]), expected)
        for bad in (1, 7, 16, 261):
            made = latents(kv_format, 300)
            made.values[bad, 3] = poison
            ReferenceOps().latent_write(made.values, made.batch([(0, 300)]), made.kv)
            out = made.attend(ops, [(0, 300)])
            assert_same_bits(out[:bad], expected[:bad])
            assert not np.isfinite(out[bad:]).all(axis=-1).any()


@latent_cases
def test_latents_are_written_as_the_codec_says(instruction_set: str, kv_format: str) -> None:
    made = latents(kv_format, 77)
    for ranges in ([(0, 77)], [(0, 5), (5, 40), (40, 77)]):
        kv = replace(made.kv, pool=latents(kv_format, 77).kv.pool.copy())
        NativeOps(3, instruction_set).latent_write(made.values, made.batch(ranges), kv)
        assert np.array_equal(kv.pool, made.kv.pool)


def test_pairs_and_latents_are_not_taken_for_each_other() -> None:
    ops, made, geometry = NativeOps(1), latents("f32", 20), Geometry(2, 1, 64)
    pool = Pool(geometry, 4)
    pairs = pool.add(*random_sequence(geometry, 20, seed=1))
    batch = made.batch([(0, 20)])
    with pytest.raises(ValueError, match="use latent_attention"):
        ops.paged_attention(made.q, batch, made.kv, 1.0, made.q.copy())
    with pytest.raises(ValueError, match="use paged_attention"):
        ops.latent_attention(pairs.q, batch, pool.kv, 16, 1.0, pairs.q[:, :, :16].copy())
    with pytest.raises(ValueError, match="latent layer"):
        ops.latent_write(made.values, batch, pool.kv)
    for rank in (0, 24, 80):
        with pytest.raises(ValueError, match="rank must be"):
            ops.latent_attention(made.q, batch, made.kv, rank, 1.0, np.empty((20, 5, rank), np.float32))
    with pytest.raises(ValueError, match="up to 640"):
        ops.latent_write(made.values, batch, replace(made.kv, head_dim=656))


def test_latents_in_formats_with_tails_are_refused() -> None:
    made = latents("int8", 20)
    tail = replace(made.kv, kv_format="bf16", kind="tail", layer_offset=0)
    with pytest.raises(ValueError, match="latents cannot be kept in a KV format that has tails"):
        replace(made, kv=replace(made.kv, kv_format="int4", tail=tail)).attend(NativeOps(1), [(0, 20)])
