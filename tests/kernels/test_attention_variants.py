"""Windows, soft caps and sinks: their meaning, and law 1 for each of them alone and together."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.kernels.reference import ReferenceOps
from tests.kernels.paged_case import (
    INSTRUCTION_SETS,
    POISONS,
    Geometry,
    Options,
    Piece,
    Pool,
    assert_same_bits,
    attend,
    attend_in_chunks,
    batch_of,
    decode,
    few_cases,
    random_sequence,
    tolerance,
)

SINKS = (1.5, -3.0, 8.0, 0.0, -1e30, 40.0)
GEOMETRY = Geometry(6, 2, 64)
VARIANTS = {
    "window 1": Options(window=1),
    "window 5": Options(window=5),
    "window 16": Options(window=16),
    "window 40": Options(window=40),
    "window 256": Options(window=256),
    "window 300": Options(window=300),
    "window beyond the sequence": Options(window=2**31 - 1),
    "softcap": Options(softcap=5.0),
    "sinks": Options(sinks=SINKS),
    "all": Options(window=270, softcap=20.0, sinks=SINKS),
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
instruction_sets = pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)


def geometry_of(kv_format: str, block_size: int = 16) -> Geometry:
    return Geometry(6, 2, 64, kv_format, block_size)


@variants
@few_cases
def test_against_the_reference(instruction_set: str, kv_format: str, options: Options) -> None:
    pool = Pool(geometry_of(kv_format, 32), 80)
    sequences = [pool.add(*random_sequence(GEOMETRY, n, seed=n)) for n in (1, 37, 330, 700)]
    whole, middle, chunk, last = sequences
    pieces = [Piece(whole, 0, 1), Piece(middle, 0, 37), Piece(chunk, 240, 330), Piece(last, 699, 700)]
    found = attend(NativeOps(2, instruction_set), pool, pieces, options=options)
    expected = attend(ReferenceOps(), pool, pieces, options=options)
    assert np.abs(found - expected).max() < tolerance(instruction_set, kv_format)


@variants
@few_cases
def test_a_row_has_the_same_bits_in_every_chunk_batch_and_number_of_threads(
    instruction_set: str, kv_format: str, options: Options
) -> None:
    pool = Pool(geometry_of(kv_format), 50)
    sequence = pool.add(*random_sequence(GEOMETRY, 601, seed=1))
    one, two, four = (NativeOps(n, instruction_set) for n in (1, 2, 4))
    expected = decode(one, pool, sequence, options)
    for chunk in (7, 64, 100, 601):
        assert_same_bits(attend_in_chunks(two, pool, sequence, chunk, options), expected)
    assert_same_bits(attend_in_chunks(four, pool, sequence, 16, options), expected)
    for row in (0, 15, 255, 256, 600):
        assert_same_bits(attend(four, pool, [Piece(sequence, row, row + 1)], options=options)[0], expected[row])


@pytest.mark.parametrize("window", [40, 300])
@pytest.mark.parametrize("kv_format", ["bf16", "fp8_e4m3", "int8", "k8v4"])
@pytest.mark.parametrize("num_heads", [5, 7, 12])
@instruction_sets
def test_many_query_heads_of_a_kv_head_have_the_same_bits_in_every_chunk(
    instruction_set: str, num_heads: int, kv_format: str, window: int
) -> None:
    geometry, options = Geometry(num_heads, 1, 64, kv_format), Options(window=window)
    pool = Pool(geometry, 40)
    sequence = pool.add(*random_sequence(geometry, 400, seed=9))
    ops = NativeOps(2, instruction_set)
    expected = decode(ops, pool, sequence, options)
    for chunk in (2, 30, 400):
        assert_same_bits(attend_in_chunks(ops, pool, sequence, chunk, options), expected)


@pytest.mark.parametrize("window", [100, 1000])
@few_cases
def test_few_rows_of_a_long_context_are_cut_along_the_keys(instruction_set: str, kv_format: str, window: int) -> None:
    geometry = Geometry(3, 1, 64, kv_format)
    pool, options = Pool(geometry, 200), Options(window=window, sinks=SINKS[:3])
    sequence = pool.add(*random_sequence(geometry, 3000, seed=4))
    one, four = NativeOps(1, instruction_set), NativeOps(4, instruction_set)
    expected = attend(one, pool, [Piece(sequence, 2900, 3000)], options=options)
    for first, length in ((50, 1), (50, 2), (60, 16), (50, 17)):
        rows = Piece(sequence, 2900 + first, 2900 + first + length)
        assert_same_bits(attend(four, pool, [rows], options=options), expected[first : first + length])


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("window", [3, 16, 33, 256])
@few_cases
def test_tokens_that_a_window_has_passed_never_matter(
    instruction_set: str, kv_format: str, window: int, poison: float
) -> None:
    """A token that has gone wrong is seen by the rows whose window it is in, and by no other row of the chunk.

    Where keys are quantised by whole tiles, by those whose window its tile is in.
    """
    q, k, v = random_sequence(GEOMETRY, 400, seed=11)
    ops, options = NativeOps(2, instruction_set), Options(window=window)
    pool = Pool(geometry_of(kv_format), 40)
    expected = attend_in_chunks(ops, pool, pool.add(q, k, v), 400, options)
    for bad in (0, 7, 16, 130, 255, 256):
        k_bad, v_bad = k.copy(), v.copy()
        k_bad[:, bad], v_bad[:, bad, 5] = poison, poison
        pool = Pool(geometry_of(kv_format), 40)
        sequence = pool.add(q, k_bad, v_bad)
        out = attend_in_chunks(ops, pool, sequence, 400, options)
        assert_same_bits(out[:bad], expected[:bad])
        passed = window + (bad if pool.kv.tail is None else bad // 16 * 16 + 15)
        assert_same_bits(out[passed:], expected[passed:])
        assert not np.isfinite(out[bad : min(bad + window, 400)]).all(axis=-1).any()
        assert_same_bits(decode(ops, pool, sequence, options)[passed:], expected[passed:])


@instruction_sets
def test_a_soft_cap_is_exact_for_scores_near_zero_and_far_away(instruction_set: str) -> None:
    """Scores from 1e-6 to 1e6 of either sign; a cap of 30."""
    geometry = Geometry(1, 1, 16)
    q, k, v = np.zeros((40, 1, 16), np.float32), np.zeros((1, 40, 16), np.float32), np.zeros((1, 40, 16), np.float32)
    q[:, :, 0] = 1.0
    k[0, :, 0] = np.repeat(np.float32(10.0) ** np.arange(-10, 10), 2) * np.tile([1, -1], 20)
    v[0] = np.eye(40, 16)
    v[0, 16:] = np.random.default_rng(0).standard_normal((24, 16))
    pool = Pool(geometry, 4)
    sequence = pool.add(q, k, v)
    found = attend(NativeOps(1, instruction_set), pool, [Piece(sequence, 0, 40)], 1.0, Options(softcap=30.0))
    for row in range(40):
        scores = 30 * np.tanh(k[0, : row + 1, 0].astype(np.float64) / 30)
        weights = np.exp(scores - scores.max())
        expected = weights @ v[0, : row + 1].astype(np.float64) / weights.sum()
        np.testing.assert_allclose(found[row, 0], expected, atol=3e-6)


@instruction_sets
def test_a_sink_far_above_the_scores_takes_everything(instruction_set: str) -> None:
    pool = Pool(GEOMETRY, 4)
    sequence = pool.add(*random_sequence(GEOMETRY, 20, seed=3))
    options = Options(sinks=(1e4, -np.inf, 1e4, 1e4, -np.inf, -1e38))
    found = attend(NativeOps(1, instruction_set), pool, [Piece(sequence, 0, 20)], options=options)
    without = attend(NativeOps(1, instruction_set), pool, [Piece(sequence, 0, 20)])
    assert (found[:, [0, 2, 3]] == 0).all()
    np.testing.assert_allclose(found[:, [1, 4, 5]], without[:, [1, 4, 5]], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(window=-1), "window must be 0"),
        (Options(softcap=-1.0), "softcap must be 0"),
        (Options(softcap=float("nan")), "softcap must be 0"),
        (Options(sinks=(1.0,) * 5), "sinks must be"),
    ],
)
def test_options_without_a_meaning_are_refused(options: Options, message: str) -> None:
    pool = Pool(GEOMETRY, 4)
    sequence = pool.add(*random_sequence(GEOMETRY, 20, seed=3))
    batch, q = batch_of([Piece(sequence, 0, 20)]), sequence.q
    with pytest.raises(ValueError, match=message):
        NativeOps(1).paged_attention(q, batch, pool.kv, 0.1, q.copy(), **options.arguments())  # type: ignore[arg-type]
