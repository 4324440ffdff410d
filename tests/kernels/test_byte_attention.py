"""Attention over codes means what byte_attention.py says where bytes are multiplied, else what reference.py says."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kernels import byte_attention
from octavo.kernels.byte_attention import Codes
from octavo.kernels.native import NativeOps
from octavo.kernels.reference import ReferenceOps
from octavo.kv_formats import bf16, int8, k8v4
from tests.kernels.paged_case import (
    INSTRUCTION_SETS,
    Geometry,
    Options,
    Piece,
    Pool,
    Stored,
    attend,
    batch_of,
    random_sequence,
)

MULTIPLIES_BYTES = "avx512_bf16"
SHAPES = [(9, 3, 64), (8, 1, 128), (2, 1, 256), (12, 1, 32), (7, 1, 64)]
CASES = [("int8", *shape, has_scales) for shape in [(3, 3, 16), (4, 2, 48), *SHAPES] for has_scales in (False, True)]
CASES += [("k8v4", *shape, False) for shape in SHAPES]


def as_int8(x: np.ndarray) -> Codes:
    codes, scales = int8.encode(x)
    return Codes(codes.view(np.int8), bf16.from_bits(scales))


def as_4_bits(x: np.ndarray) -> Codes:
    codes, scale_bits, minima = k8v4.encode(x)
    scales = bf16.from_bits(scale_bits)
    return Codes((codes - 8).view(np.int8), scales, 8 * scales + bf16.from_bits(minima))


def largest_code(pool: Pool) -> int:
    return byte_attention.QUERY_8 if pool.kv.k_scales is None else byte_attention.QUERY_16


def expected_of(pool: Pool, sequence: Stored, rows: range, options: Options) -> np.ndarray:
    """[rows, num_heads, head_dim] in numpy, from the codes that the pool holds."""
    geometry = pool.geometry
    group = geometry.num_heads // geometry.num_kv_heads
    scale = np.float32(geometry.head_dim**-0.5) * np.float32(1.44269504)
    out = np.zeros((len(rows), geometry.num_heads, geometry.head_dim))
    for head in range(geometry.num_heads):
        k = as_int8(sequence.k[head // group])
        v = (as_int8 if geometry.kv_format == "int8" else as_4_bits)(sequence.v[head // group])
        for i, row in enumerate(rows):
            first = max(0, row - options.window + 1) if options.window else 0
            seen = slice(row + 1)
            q = sequence.q[row, head] * scale
            out[i, head] = byte_attention.attend(q, k[seen], v[seen], first, largest_code(pool))
    return out


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("window", [0, 200])
@pytest.mark.parametrize(("kv_format", "num_heads", "num_kv_heads", "head_dim", "has_scales"), CASES)
def test_what_it_means(
    instruction_set: str,
    window: int,
    kv_format: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_scales: bool,
) -> None:
    ones = np.ones((num_kv_heads, head_dim), np.float32)
    pool = Pool(Geometry(num_heads, num_kv_heads, head_dim, kv_format), 64, scales=(ones, ones) if has_scales else None)
    q, k, v = random_sequence(pool.geometry, 530, seed=head_dim)
    k[:, 0] *= 4  # one key that most of the weight goes to, as the first of a text is
    v[:, 100:140] *= np.float32(1e-3)
    sequence, rows, options = pool.add(q, k, v), range(515, 530), Options(window=window)
    found = attend(NativeOps(2, instruction_set), pool, [Piece(sequence, rows[0], rows[-1] + 1)], options=options)
    if instruction_set == MULTIPLIES_BYTES:
        expected = expected_of(pool, sequence, rows, options)
    else:
        expected = np.zeros_like(found)
        batch = batch_of([Piece(sequence, rows[0], rows[-1] + 1)])
        scale = head_dim**-0.5
        ReferenceOps().paged_attention(q[rows[0] :], batch, pool.kv, scale, expected, window=window)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_little_weights_keep_their_bits_beside_a_large_one() -> None:
    """A key has 0.999 of the weight, 511 others share the rest: of those, only the 31 of its own unit are lost."""
    rng = np.random.default_rng(3)
    v = rng.integers(-127, 128, (512, 64)).astype(np.int8)
    k = np.zeros((512, 64), np.int8)
    k[0, 0] = 127
    v[0] = 0
    scales = np.full(512, 1 / 127, np.float32)
    q = np.zeros(64, np.float32)
    q[0] = np.log2(511 * 999)
    found = byte_attention.attend(q, Codes(k, scales), Codes(v, scales))
    weight, unit = 0.001 / 511, byte_attention.UNIT_KEYS
    expected = weight * (v[unit:].astype(np.float64) / 127).sum(axis=0)
    assert np.abs(found - expected).max() < 0.005 * np.abs(expected).max()
    assert np.rint(255 * weight / 0.999) == 0  # what a single unit for all would leave of each


@pytest.mark.parametrize("score", [1e3, 1e6, 1e8, -1e8])
@pytest.mark.parametrize("kv_format", ["int8", "k8v4", "int4"])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_scores_may_lie_anywhere(instruction_set: str, kv_format: str, score: float) -> None:
    """One key has all the weight, with a score so large that a score of one unit less is the same number."""
    size = np.float32(np.sqrt(abs(score)))
    for seed in range(8):
        pool = Pool(Geometry(1, 1, 32, kv_format), 24)
        q, k, v = random_sequence(pool.geometry, 300, seed=seed)
        favourite = 37 * seed + 5
        q[...], k[...] = 0, 0
        q[:, :, 0], k[:, :, 0] = size, -2 * size
        k[:, favourite, 0] = np.copysign(size, score)
        found = attend(NativeOps(1, instruction_set), pool, [Piece(pool.add(q, k, v), 299, 300)], scale=1.0)
        error = np.abs(found[0, 0] - v[0, favourite]).max()
        assert error < (0.02 if kv_format == "int8" else 0.15) * np.abs(v[0, favourite]).max()


@pytest.mark.parametrize("kv_format", ["int8", "k8v4", "int4"])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_values_that_are_all_the_same(instruction_set: str, kv_format: str) -> None:
    """Of 4 bits, their scales are 0, and all of them is in what is added apart."""
    pool = Pool(Geometry(6, 2, 64, kv_format), 8)
    q, k, v = random_sequence(pool.geometry, 90, seed=4)
    v[...] = np.float32(98304)  # a number of bf16
    found = attend(NativeOps(2, instruction_set), pool, [Piece(pool.add(q, k, v), 0, 90)])
    assert np.abs(found / np.float32(98304) - 1).max() < (0.02 if kv_format == "int8" else 0.001)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_query_that_is_not_finite_gives_nan_to_its_row_alone(instruction_set: str, bad: float) -> None:
    pool = Pool(Geometry(6, 2, 64, "int8"), 8)
    q, k, v = random_sequence(pool.geometry, 40, seed=1)
    sequence, ops = pool.add(q, k, v), NativeOps(2, instruction_set)
    before = attend(ops, pool, [Piece(sequence, 0, 40)])
    q[17, 3, 5] = bad
    after = attend(ops, pool, [Piece(sequence, 0, 40)])
    assert np.isnan(after[17, 3]).all()
    after[17, 3] = before[17, 3]
    assert np.array_equal(before.view(np.uint32), after.view(np.uint32))


@pytest.mark.parametrize("size", [0.0, 2.0**-100, 2.0**-66, 2.0**66])
@pytest.mark.parametrize("kv_format", ["int8", "k8v4", "int4"])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_values_of_any_size(instruction_set: str, kv_format: str, size: float) -> None:
    """V of zeros gives zeros; times a power of two, its codes are the same: only weights may be rounded otherwise."""
    geometry = Geometry(6, 2, 64, kv_format)
    pool = Pool(geometry, 80)
    q, k, v = random_sequence(geometry, 300, seed=2)
    plain, scaled = pool.add(q, k, v), pool.add(q, k, v * np.float32(size))
    ops = NativeOps(2, instruction_set)
    first, second = (attend(ops, pool, [Piece(one, 250, 300)]) for one in (plain, scaled))
    assert np.abs(second - first * np.float32(size)).max() <= 0.02 * size


@pytest.mark.parametrize("size", [1.0, 1e4, np.nan])
@pytest.mark.parametrize("kv_format", ["int8", "k8v4"])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_the_last_row_of_a_span_alone_and_among_others(instruction_set: str, kv_format: str, size: float) -> None:
    """Alone, it sees all keys of its span, whose bounds are noted with scores; beside rows that see fewer, not."""
    geometry = Geometry(9, 3, 64, kv_format)
    pool = Pool(geometry, 80)
    q, k, v = random_sequence(geometry, 256, seed=6)
    k[:, 40] *= np.float32(size)  # far scores, or none
    sequence, ops = pool.add(q, k, v), NativeOps(1, instruction_set)
    alone, among = (attend(ops, pool, [Piece(sequence, first, 256)])[-1] for first in (255, 240))
    assert np.array_equal(alone.view(np.uint32), among.view(np.uint32))
