"""rope_write: rotation, norms, and K and V in their slots with exactly the codec's bytes, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32, RopeTable
from octavo.kernels.reference import ReferenceOps
from tests.kernels.paged_case import INSTRUCTION_SETS, Geometry, Piece, Pool, Stored, batch_of, cases, holds


def rope_table(max_positions: int, rotary_dim: int) -> RopeTable:
    frequencies = 10000.0 ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    angles = np.arange(max_positions)[:, None] * frequencies
    return RopeTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


def pieces_in(pool: Pool, rows: list[tuple[int, int]]) -> list[Piece]:
    """Sequences of which rows [first, end) are to be written now."""
    size, empty = pool.geometry.block_size, np.zeros(0, np.float32)
    blocks = iter(np.random.default_rng(3).permutation(len(pool.kv.pool) // pool.kv.block_bytes).tolist())
    return [
        Piece(Stored(empty, empty, empty, [next(blocks) for _ in range(-(-end // size))]), a, end) for a, end in rows
    ]


ROWS = [(0, 5), (30, 31), (7, 60), (0, 1), (15, 17), (63, 64), (0, 100)]


def random_qkv(geometry: Geometry, num_tokens: int) -> F32:
    width = (geometry.num_heads + 2 * geometry.num_kv_heads) * geometry.head_dim
    return np.random.default_rng(1).standard_normal((num_tokens, width), np.float32)


@cases
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "block_size"),
    [(9, 3, 64, 64, 16), (2, 2, 16, 16, 48), (4, 1, 80, 32, 32), (2, 1, 256, 256, 64), (3, 3, 48, 6, 16)],
)
def test_bytes_and_rotation_equal_the_reference(
    instruction_set: str,
    kv_format: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
) -> None:
    if not holds(kv_format, head_dim):
        pytest.skip("heads of this size are refused")
    geometry = Geometry(num_heads, num_kv_heads, head_dim, kv_format, block_size)
    ours, theirs = Pool(geometry, 30), Pool(geometry, 30)
    pieces = pieces_in(ours, ROWS)
    batch, rope = batch_of(pieces), rope_table(128, rotary_dim)
    qkv = random_qkv(geometry, int(batch.query_start[-1]))
    out, expected = (np.zeros((len(qkv), num_heads, head_dim), np.float32) for _ in range(2))
    NativeOps(2, instruction_set).rope_write(qkv, batch, rope, ours.kv, out)
    ReferenceOps().rope_write(qkv, batch, rope, theirs.kv, expected)
    assert np.array_equal(out, expected)
    assert np.array_equal(ours.kv.pool, theirs.kv.pool)  # poison in all other slots and layers included


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
def test_norms_before_the_rotation(instruction_set: str, kv_format: str) -> None:
    geometry = Geometry(4, 2, 128, kv_format)
    ours, theirs = Pool(geometry, 30, poison=0.0), Pool(geometry, 30, poison=0.0)
    batch, rope = batch_of(pieces_in(ours, ROWS)), rope_table(128, 128)
    qkv = random_qkv(geometry, int(batch.query_start[-1]))
    rng = np.random.default_rng(2)
    q_norm, k_norm = (1 + 0.1 * rng.standard_normal(128).astype(np.float32) for _ in range(2))
    out, expected = (np.zeros((len(qkv), 4, 128), np.float32) for _ in range(2))
    NativeOps(2, instruction_set).rope_write(
        qkv, batch, rope, ours.kv, out, q_norm=q_norm, k_norm=k_norm, norm_eps=1e-6
    )
    ReferenceOps().rope_write(qkv, batch, rope, theirs.kv, expected, q_norm=q_norm, k_norm=k_norm, norm_eps=1e-6)
    assert np.abs(out - expected).max() < 2e-6
    if kv_format == "f32":
        assert np.abs(ours.kv.pool.view(np.float32) - theirs.kv.pool.view(np.float32)).max() < 2e-6
    else:  # the rounding may fall to the other side of a tie
        ulps = ours.kv.pool.view(np.int16).astype(int) - theirs.kv.pool.view(np.int16)
        assert np.abs(ulps).max() <= 1
        assert (ulps != 0).mean() < 1e-3


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_rows_do_not_depend_on_the_batch_or_the_threads(instruction_set: str) -> None:
    geometry = Geometry(4, 2, 64, "bf16")
    whole, apart = Pool(geometry, 30), Pool(geometry, 30)
    pieces, rope = pieces_in(whole, ROWS), rope_table(128, 64)
    norm = np.linspace(0.5, 1.5, 64, dtype=np.float32)
    qkv = random_qkv(geometry, sum(piece.end - piece.first for piece in pieces))
    out, single = (np.zeros((len(qkv), 4, 64), np.float32) for _ in range(2))
    NativeOps(4, instruction_set).rope_write(
        qkv, batch_of(pieces), rope, whole.kv, out, q_norm=norm, k_norm=norm, norm_eps=1e-5
    )
    ops, row = NativeOps(1, instruction_set), 0
    for piece in pieces:
        for position in range(piece.first, piece.end):
            batch = batch_of([Piece(piece.sequence, position, position + 1)])
            rows = slice(row, row + 1)
            ops.rope_write(qkv[rows], batch, rope, apart.kv, single[rows], q_norm=norm, k_norm=norm, norm_eps=1e-5)
            row += 1
    assert np.array_equal(out, single)
    assert np.array_equal(whole.kv.pool, apart.kv.pool)


def all_bf16_neighbourhoods() -> F32:
    """Every bf16 value and floats around each: exact, the tie above, and the floats on both sides of the tie."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    low = np.array([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (high[:, None] | low).reshape(-1).view(np.float32)


@cases
def test_every_value_is_written_as_the_codec_says(instruction_set: str, kv_format: str) -> None:
    """NaN of every payload, infinities, denormals, ties: unrotated (rotary_dim 0) so that K passes through too."""
    geometry = Geometry(1, 1, 256, kv_format, block_size=256)
    values = all_bf16_neighbourhoods().reshape(-1, 256)
    num_tokens = len(values)
    qkv = np.concatenate([values, values, values[::-1]], axis=1)
    num_blocks = -(-num_tokens // 256)
    pool, expected = Pool(geometry, num_blocks, poison=0.0), Pool(geometry, num_blocks, poison=0.0)
    stored = expected.add(values[:, None], values[None], values[None, ::-1])
    out = np.zeros((num_tokens, 1, 256), np.float32)
    rope = RopeTable(np.zeros((num_tokens, 0), np.float32), np.zeros((num_tokens, 0), np.float32))
    NativeOps(2, instruction_set).rope_write(qkv, batch_of([Piece(stored, 0, num_tokens)]), rope, pool.kv, out)
    assert np.array_equal(pool.kv.pool, expected.kv.pool)
    assert np.array_equal(out.view(np.uint32)[:, 0], values.view(np.uint32))
