"""Heads that are turned before they are rounded: bytes as of the reference, what is read is what was meant, law 1."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32, MASS_UNITS, WeighedRows
from octavo.kernels.reference import ReferenceOps
from octavo.kv_formats.hadamard import turn
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
    holds,
    random_sequence,
    tolerance,
)
from tests.kernels.test_channel_scales import channel_scales
from tests.kernels.test_rope_write import ROWS, pieces_in, random_qkv, rope_table

SCALED = ("fp8_e4m3", "fp8_e5m2", "int8")
each = pytest.mark.parametrize(
    ("instruction_set", "kv_format"),
    [(one, kv_format) for one in INSTRUCTION_SETS for kv_format in (*SCALED, "k8v4", "int4")],
)


def means_of(geometry: Geometry) -> F32:
    shape = (geometry.num_kv_heads, geometry.head_dim)
    return np.random.default_rng(9).standard_normal(shape).astype(np.float32)


def turned_pool(geometry: Geometry, num_blocks: int) -> Pool:
    """With scales and means as well, where the format may have some."""
    if geometry.kv_format not in SCALED:
        return Pool(geometry, num_blocks, is_turned=True)
    return Pool(geometry, num_blocks, scales=channel_scales(geometry), k_means=means_of(geometry), is_turned=True)


@each
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 128, 256])
def test_what_is_written_is_turned(instruction_set: str, kv_format: str, head_dim: int) -> None:
    if not holds(kv_format, head_dim):
        pytest.skip("heads of this size are refused")
    geometry = Geometry(4, 2, head_dim, kv_format, 32)
    ours, theirs = turned_pool(geometry, 30), turned_pool(geometry, 30)
    batch, rope = batch_of(pieces_in(ours, ROWS)), rope_table(128, head_dim)
    qkv = random_qkv(geometry, int(batch.query_start[-1]))
    out, expected = (np.zeros((len(qkv), 4, head_dim), np.float32) for _ in range(2))
    NativeOps(2, instruction_set).rope_write(qkv, batch, rope, ours.kv, out)
    ReferenceOps().rope_write(qkv, batch, rope, theirs.kv, expected)
    assert np.array_equal(out, expected)
    assert np.array_equal(ours.kv.pool, theirs.kv.pool)
    before = ours.kv.pool.copy()
    NativeOps(2, instruction_set).rope_write(qkv, batch, rope, replace(ours.kv, is_turned=False), out)
    assert np.array_equal(out, expected), "queries are turned where they are read"
    assert not np.array_equal(ours.kv.pool, before)


@each
def test_what_is_read_is_turned_back_and_rows_keep_their_bits(instruction_set: str, kv_format: str) -> None:
    geometry = Geometry(6, 2, 64, kv_format)
    pool = turned_pool(geometry, 40)
    q, k, v = random_sequence(geometry, 330, seed=3)
    k_scales, v_scales = channel_scales(geometry) if kv_format in SCALED else np.ones((2, 2, 64), np.float32)
    q /= k_scales.repeat(3, axis=0)
    sequence = pool.add(q, k * k_scales[:, None], v * v_scales[:, None])
    one, two = NativeOps(1, instruction_set), NativeOps(2, instruction_set)
    options = Options(window=290)
    rows = decode(one, pool, sequence, options)
    expected = decode(ReferenceOps(), pool, sequence, options)
    error = np.abs(rows - expected) / v_scales.repeat(3, axis=0)
    assert error.max() < 2 * tolerance(instruction_set, kv_format), "the reference adds the means again"
    for chunk in (64, 330):
        assert_same_bits(attend_in_chunks(two, pool, sequence, chunk, options), rows)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_what_is_counted_of_attention_is_the_same(instruction_set: str) -> None:
    geometry = Geometry(4, 2, 64, "int8")
    pool = Pool(geometry, 10, is_turned=True)
    sequence = pool.add(*random_sequence(geometry, 70, seed=4))
    found = []
    for ops in (NativeOps(2, instruction_set), ReferenceOps()):
        rows = WeighedRows(0, 40, np.zeros((1, 2, 80), np.int64))
        ops.attention_mass(sequence.q, batch_of([Piece(sequence, 0, 70)]), pool.kv, 0.125, rows, 0)
        found.append(rows.mass[0] / MASS_UNITS)
    np.testing.assert_allclose(*found, atol=0.1)
    assert found[0].sum() == pytest.approx(30 * 4, rel=1e-4)


def test_a_channel_that_is_large_in_every_token_costs_less() -> None:
    """Why it is done: a scale for the whole token would have little room for the other channels."""
    geometry = Geometry(2, 1, 128, "int8")
    q, k, v = random_sequence(geometry, 64, seed=5)
    k[..., 7] += 60
    errors = []
    for is_turned in (False, True):
        pool = Pool(geometry, 8, is_turned=is_turned)
        found = attend(ReferenceOps(), pool, [Piece(pool.add(q, k, v), 0, 64)])
        exact = Pool(replace(geometry, kv_format="f32"), 8)
        expected = attend(ReferenceOps(), exact, [Piece(exact.add(q, k, v), 0, 64)])
        errors.append(float(np.square(found - expected).mean()))
    assert errors[1] < errors[0] / 10


def test_means_of_keys_do_not_go_with_soft_caps_and_sinks() -> None:
    """What all scores have in common is left out of them."""
    geometry = Geometry(4, 2, 64, "int8")
    pool = turned_pool(geometry, 4)
    sequence = pool.add(*random_sequence(geometry, 20, seed=3))
    good = pool.kv
    for options in (Options(softcap=30.0), Options(sinks=(0.0, 1.0, 2.0, 3.0))):
        with pytest.raises(ValueError, match="without softcap and sinks only"):
            attend(NativeOps(1), pool, [Piece(sequence, 0, 20)], options=options)
    assert good.k_means is not None
    for wrong, message in (
        (replace(good, k_means=good.k_means[:1].copy()), "means must be"),
        (replace(good, k_scales=None, v_scales=None), "means of K go with scales"),
    ):
        pool.kv = wrong
        with pytest.raises(ValueError, match=message):
            attend(NativeOps(1), pool, [Piece(sequence, 0, 20)])


def test_latents_are_not_turned() -> None:
    geometry = Geometry(1, 1, 64, "int8")
    pool = Pool(geometry, 4, is_turned=True)
    latent: F32 = np.zeros((3, 64), np.float32)
    batch = batch_of([Piece(pool.add(*random_sequence(geometry, 3, seed=1)), 0, 3)])
    with pytest.raises(ValueError, match="latents are not turned"):
        NativeOps(1).latent_write(latent, batch, replace(pool.kv, kind="latent"))


def test_poison_beside_a_turned_vector_stays_there() -> None:
    geometry = Geometry(4, 2, 32, "fp8_e4m3")
    rows = []
    for poison in (np.nan, 0.0):
        pool = Pool(geometry, 8, poison=poison, is_turned=True)
        rows.append(decode(NativeOps(2), pool, pool.add(*random_sequence(geometry, 37, seed=6))))
    assert_same_bits(*rows)
    assert np.isfinite(turn(rows[0])).all()
