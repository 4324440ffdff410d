"""fp8 and int8 with a scale for each channel: stored divided by it, read multiplied, law 1 as everywhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32
from octavo.kernels.reference import ReferenceOps
from tests.kernels.paged_case import (
    INSTRUCTION_SETS,
    Geometry,
    Options,
    Piece,
    Pool,
    assert_same_bits,
    attend,
    attend_in_chunks,
    batch_of,
    decode,
    random_sequence,
    tolerance,
)
from tests.kernels.test_rope_write import ROWS, pieces_in, random_qkv, rope_table

FORMATS = ("fp8_e4m3", "fp8_e5m2", "int8")
each = pytest.mark.parametrize(
    ("instruction_set", "kv_format"), [(one, kv_format) for one in INSTRUCTION_SETS for kv_format in FORMATS]
)


def channel_scales(geometry: Geometry) -> tuple[F32, F32]:
    """Not powers of two, and far from each other."""
    shape = (2, geometry.num_kv_heads, geometry.head_dim)
    k, v = np.exp(2 * np.random.default_rng(5).standard_normal(shape)).astype(np.float32)
    return k, v


@each
def test_what_is_written_is_divided(instruction_set: str, kv_format: str) -> None:
    geometry = Geometry(4, 2, 48, kv_format, 32)
    scales = channel_scales(geometry)
    ours, theirs, plain = Pool(geometry, 30, scales=scales), Pool(geometry, 30, scales=scales), Pool(geometry, 30)
    batch, rope = batch_of(pieces_in(ours, ROWS)), rope_table(128, 48)
    qkv = random_qkv(geometry, int(batch.query_start[-1]))
    out, expected = (np.zeros((len(qkv), 4, 48), np.float32) for _ in range(2))
    NativeOps(2, instruction_set).rope_write(qkv, batch, rope, ours.kv, out)
    ReferenceOps().rope_write(qkv, batch, rope, theirs.kv, expected)
    ReferenceOps().rope_write(qkv, batch, rope, plain.kv, expected)
    assert np.array_equal(out, expected), "queries are not divided"
    assert np.array_equal(ours.kv.pool, theirs.kv.pool)
    assert not np.array_equal(ours.kv.pool, plain.kv.pool)


@each
def test_what_is_read_is_multiplied_and_rows_keep_their_bits(instruction_set: str, kv_format: str) -> None:
    geometry = Geometry(6, 2, 64, kv_format)
    k_scales, v_scales = channel_scales(geometry)
    pool = Pool(geometry, 40, scales=(k_scales, v_scales))
    q, k, v = random_sequence(geometry, 330, seed=3)
    q /= k_scales.repeat(3, axis=0)
    sequence = pool.add(q, k * k_scales[:, None], v * v_scales[:, None])
    one, two = NativeOps(1, instruction_set), NativeOps(2, instruction_set)
    options = Options(window=290)
    rows = decode(one, pool, sequence, options)
    expected = decode(ReferenceOps(), pool, sequence, options)
    error = np.abs(rows - expected) / v_scales.repeat(3, axis=0)
    assert error.max() < tolerance(instruction_set, kv_format)
    for chunk in (64, 330):
        assert_same_bits(attend_in_chunks(two, pool, sequence, chunk, options), rows)


def test_scales_that_do_not_fit_are_refused() -> None:
    geometry = Geometry(4, 2, 64, "fp8_e4m3")
    k, v = channel_scales(geometry)
    pool = Pool(geometry, 4, scales=(k, v))
    sequence = pool.add(*random_sequence(geometry, 20, seed=3))
    good = pool.kv
    for wrong, message in (
        (replace(good, v_scales=None), "come together"),
        (replace(good, k_scales=k[:1].copy()), "num_kv_heads, head_dim"),
        (replace(good, k_scales=k[:, :32].copy()), "num_kv_heads, head_dim"),
        (replace(good, kv_format="bf16", block_bytes=4 * good.block_bytes, pool=np.tile(good.pool, 4)), "go with fp8"),
    ):
        pool.kv = wrong
        with pytest.raises(ValueError, match=message):
            attend(NativeOps(1), pool, [Piece(sequence, 0, 20)])
