"""Paged attention means what reference.py says, on every instruction set, geometry and kind of batch."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.kernels.reference import ReferenceOps
from tests.kernels.paged_case import (
    INSTRUCTION_SETS,
    Geometry,
    Piece,
    Pool,
    attend,
    attention_f64,
    batch_of,
    cases,
    holds,
    random_sequence,
    tolerance,
)


@cases
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(3, 3, 16), (4, 2, 48), (9, 3, 64), (8, 2, 80), (8, 1, 128), (2, 1, 256), (5, 1, 64), (14, 2, 64), (20, 1, 16)],
)
def test_against_the_reference(
    instruction_set: str, kv_format: str, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    if not holds(kv_format, head_dim):
        pytest.skip("heads of this size are refused")
    geometry = Geometry(num_heads, num_kv_heads, head_dim, kv_format, block_size=32)
    pool = Pool(geometry, 64)
    sequences = [pool.add(*random_sequence(geometry, n, seed=n)) for n in (1, 37, 300, 530)]
    whole, middle, long_chunk, decode = sequences
    pieces = [Piece(whole, 0, 1), Piece(middle, 0, 37), Piece(long_chunk, 250, 300), Piece(decode, 529, 530)]
    out = attend(NativeOps(2, instruction_set), pool, pieces)
    expected = np.zeros_like(out)
    q = np.concatenate([piece.sequence.q[piece.first : piece.end] for piece in pieces])
    ReferenceOps().paged_attention(q, batch_of(pieces), pool.kv, head_dim**-0.5, expected)
    assert np.abs(out - expected).max() < tolerance(instruction_set, kv_format)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_f32_is_accurate_over_many_spans(instruction_set: str) -> None:
    geometry = Geometry(4, 2, 64)
    pool = Pool(geometry, 260)
    sequence = pool.add(*random_sequence(geometry, 4100, seed=5))
    rows = [0, 15, 16, 255, 256, 257, 1000, 4099]
    out = attend(NativeOps(2, instruction_set), pool, [Piece(sequence, row, row + 1) for row in rows])
    for row, found in zip(rows, out, strict=True):
        expected = attention_f64(pool, sequence, row, 64**-0.5)
        assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_bf16_error_is_that_of_bf16(instruction_set: str) -> None:
    geometry = Geometry(9, 3, 64, "bf16")
    pool = Pool(geometry, 70)
    sequence = pool.add(*random_sequence(geometry, 1100, seed=6))
    rows = list(range(0, 1100, 29))
    out = attend(NativeOps(2, instruction_set), pool, [Piece(sequence, row, row + 1) for row in rows])
    expected = np.stack([attention_f64(pool, sequence, row, 0.125) for row in rows])
    relative = np.sqrt(np.mean((out - expected) ** 2) / np.mean(expected**2))
    assert relative < (6e-3 if instruction_set == "avx512_bf16" else 1e-6)


@cases
def test_scores_far_apart_and_far_from_zero(instruction_set: str, kv_format: str) -> None:
    """One key takes all the weight, early or late, with scores in the thousands of either sign."""
    geometry = Geometry(1, 1, 32, kv_format)
    pool = Pool(geometry, 64)
    q, k, v = random_sequence(geometry, 700, seed=7)
    k[...], q[...] = 0.0, 16.0
    k[0, :, 0] = -200.0
    for favourite in (3, 260, 699):
        changed = k.copy()
        changed[0, favourite, 0] = -100.0
        sequence = pool.add(q, changed, v)
        out = attend(NativeOps(2, instruction_set), pool, [Piece(sequence, 699, 700)], scale=1.0)
        expected = attention_f64(pool, sequence, 699, 1.0)
        rounds_weights = instruction_set == "avx512_bf16" and kv_format in ("int8", "k8v4", "int4")
        close = 2.0**-7 * np.abs(expected).max() if rounds_weights else 1e-6
        assert np.abs(out[0] - expected).max() < close
        pool = Pool(geometry, 64)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_nan_that_is_read_is_seen(instruction_set: str) -> None:
    """What a row may see is not hidden: a NaN in its own keys makes it NaN, and no row before that."""
    geometry = Geometry(3, 1, 32)
    pool = Pool(geometry, 8)
    q, k, v = random_sequence(geometry, 60, seed=8)
    k[0, 41, 3] = np.nan
    sequence = pool.add(q, k, v)
    out = attend(NativeOps(1, instruction_set), pool, [Piece(sequence, 0, 60)])
    assert np.isfinite(out[:41]).all()
    assert np.isnan(out[41:]).all()


def test_nothing_but_the_given_rows_is_written() -> None:
    geometry = Geometry(3, 1, 32, "bf16")
    pool = Pool(geometry, 8)
    sequence = pool.add(*random_sequence(geometry, 60, seed=9))
    before = pool.kv.pool.copy()
    storage = np.full((62, 3, 32), 7.0, np.float32)
    NativeOps(2).paged_attention(sequence.q, batch_of([Piece(sequence, 0, 60)]), pool.kv, 0.2, storage[1:61])
    assert (storage[[0, 61]] == 7.0).all()
    assert (storage[1:61] != 7.0).all()
    assert np.array_equal(before, pool.kv.pool)
