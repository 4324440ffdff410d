"""Law 1: a row of paged attention has the same bits whatever is computed beside it, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32
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
    cases,
    decode,
    few_cases,
    holds,
    random_sequence,
)

SHAPES = [(2, 2, 48), (9, 3, 64), (8, 2, 32), (7, 1, 64), (8, 1, 80), (12, 1, 32)]
NUM_TOKENS = 601


@cases
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_decode_equals_every_chunk_and_every_number_of_threads(
    instruction_set: str, kv_format: str, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    if not holds(kv_format, head_dim):
        pytest.skip("heads of this size are refused")
    geometry = Geometry(num_heads, num_kv_heads, head_dim, kv_format)
    pool = Pool(geometry, 40)
    sequence = pool.add(*random_sequence(geometry, NUM_TOKENS, seed=1))
    one, two, four = (NativeOps(n, instruction_set) for n in (1, 2, 4))
    expected = decode(one, pool, sequence)
    assert_same_bits(decode(two, pool, sequence), expected)
    for chunk in (7, 16, 64, 100, NUM_TOKENS):
        assert_same_bits(attend_in_chunks(two, pool, sequence, chunk), expected)
    assert_same_bits(attend_in_chunks(one, pool, sequence, NUM_TOKENS), expected)
    assert_same_bits(attend_in_chunks(four, pool, sequence, NUM_TOKENS), expected)
    for row in (0, 15, 255, 256, 600):  # alone in a call
        assert_same_bits(attend(four, pool, [Piece(sequence, row, row + 1)])[0], expected[row])


@pytest.mark.parametrize("window", [0, 37, 300])
@pytest.mark.parametrize("kv_format", ["int8", "k8v4", "int4"])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_values_of_uneven_sizes(instruction_set: str, kv_format: str, window: int) -> None:
    """Where weights are rounded in units that values give, a row's units are of what it sees, and of nothing else."""
    geometry, options = Geometry(6, 2, 64, kv_format), Options(window=window)
    pool, rng = Pool(geometry, 40), np.random.default_rng(11)
    q, k, v = random_sequence(geometry, NUM_TOKENS, seed=11)
    v *= np.exp2(rng.integers(-100, 30, (2, NUM_TOKENS, 1))).astype(np.float32)
    v[:, rng.integers(0, NUM_TOKENS, 60)] = 0
    v[:, rng.integers(0, NUM_TOKENS, 60)] = 3e4
    sequence, ops = pool.add(q, k, v), NativeOps(2, instruction_set)
    expected = decode(ops, pool, sequence, options)
    assert np.isfinite(expected).all()
    for chunk in (7, 100, NUM_TOKENS):
        assert_same_bits(attend_in_chunks(ops, pool, sequence, chunk, options), expected)


@few_cases
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 256])
def test_block_size_and_block_ids_change_nothing(instruction_set: str, kv_format: str, block_size: int) -> None:
    rows: dict[int, F32] = {}
    for seed, size in ((0, 16), (1, block_size)):
        geometry = Geometry(6, 2, 64, kv_format, block_size=size)
        pool = Pool(geometry, 60, seed=seed)
        sequence = pool.add(*random_sequence(geometry, 530, seed=2))
        ops = NativeOps(2, instruction_set)
        rows[seed] = attend_in_chunks(ops, pool, sequence, 200)
        assert_same_bits(decode(ops, pool, sequence), rows[seed])
    assert_same_bits(rows[1], rows[0])


@cases
def test_strangers_in_the_batch_change_nothing(instruction_set: str, kv_format: str) -> None:
    geometry = Geometry(9, 3, 64, kv_format)
    pool = Pool(geometry, 400)
    own = pool.add(*random_sequence(geometry, 520, seed=3))
    strangers = [pool.add(*random_sequence(geometry, 1 + 13 * i, seed=10 + i)) for i in range(24)]
    ops = NativeOps(2, instruction_set)
    expected = decode(ops, pool, own)
    others = [Piece(s, len(s.q) - 1, len(s.q)) for s in strangers] + [Piece(s, 0, len(s.q)) for s in strangers]
    for first, end in ((519, 520), (300, 309), (5, 505)):
        out = attend(ops, pool, [*others[:20], Piece(own, first, end), *others[20:]])
        row = sum(piece.end - piece.first for piece in others[:20])
        assert_same_bits(out[row : row + end - first], expected[first:end])


@cases
def test_long_contexts_are_cut_along_the_keys_without_a_trace(instruction_set: str, kv_format: str) -> None:
    """3,000 keys and few rows: the pieces of work are parts of the keys, and differ with threads and batch."""
    geometry = Geometry(3, 1, 64, kv_format)
    pool = Pool(geometry, 200)
    sequence = pool.add(*random_sequence(geometry, 3000, seed=4))
    one, two, four = (NativeOps(n, instruction_set) for n in (1, 2, 4))
    expected = attend(one, pool, [Piece(sequence, 2900, 3000)])
    for ops in (one, two, four):
        for length in (1, 2, 5, 16, 17):
            assert_same_bits(attend(ops, pool, [Piece(sequence, 2950, 2950 + length)]), expected[50 : 50 + length])
    crowd = [Piece(sequence, row, row + 1) for row in range(2900, 3000)]
    assert_same_bits(attend(two, pool, crowd), expected)


@cases
def test_unused_and_foreign_slots_never_matter(instruction_set: str, kv_format: str) -> None:
    """Rests of blocks, free blocks and the block that padded table entries name hold zeros, NaN or infinities."""
    geometry = Geometry(8, 2, 64, kv_format, block_size=32)
    found = []
    for poison in (0.0, *POISONS):
        pool = Pool(geometry, 40, poison=poison)
        own = [pool.add(*random_sequence(geometry, n, seed=n)) for n in (3, 273, 300, 528)]
        ops = NativeOps(2, instruction_set)
        chunks = [attend_in_chunks(ops, pool, sequence, chunk) for sequence in own for chunk in (50, 600)]
        decoded = [decode(ops, pool, sequence) for sequence in own]
        found.append(np.concatenate(chunks + decoded))
    assert np.isfinite(found[0]).all()
    for rows in found[1:]:
        assert_same_bits(rows, found[0])


@few_cases
@pytest.mark.parametrize("poison", POISONS)
def test_later_tokens_never_matter(instruction_set: str, kv_format: str, poison: float) -> None:
    """A chunk whose later tokens have gone wrong (NaN, infinity) does not touch its earlier rows."""
    geometry = Geometry(9, 3, 64, kv_format)
    q, k, v = random_sequence(geometry, 300, seed=11)
    ops = NativeOps(2, instruction_set)
    pool = Pool(geometry, 20)
    expected = attend_in_chunks(ops, pool, pool.add(q, k, v), 300)
    for bad in (1, 7, 16, 261, 299):
        k_bad, v_bad = k.copy(), v.copy()
        k_bad[:, bad:], v_bad[:, bad, 5] = poison, poison
        pool = Pool(geometry, 20)
        out = attend_in_chunks(ops, pool, pool.add(q, k_bad, v_bad), 300)
        assert_same_bits(out[:bad], expected[:bad])
        assert not np.isfinite(out[bad]).all()


@cases
def test_the_sign_of_a_zero_does_not_depend_on_later_tokens(instruction_set: str, kv_format: str) -> None:
    """Weights x V underflow to -0 here; a later token's 0 x V would turn that into +0, or leave it."""
    geometry = Geometry(3, 1, 32, kv_format)
    q, k, v = random_sequence(geometry, 40, seed=12)
    k[...], q[...] = 0.0, 4.0
    k[:, 0], v[:, 0], v[:, 1:, :8], v[:, 1:, 8:] = 4.0, 0.0, -1e-40, 1e-40
    pool = Pool(geometry, 4)
    sequence = pool.add(q, k, v)
    ops = NativeOps(1, instruction_set)
    expected = decode(ops, pool, sequence)
    assert (expected == 0).all()
    assert_same_bits(attend_in_chunks(ops, pool, sequence, 40), expected)


@cases
@pytest.mark.parametrize("rows", [(0, NUM_TOKENS), (590, 591), (300, 600)])
def test_results_may_lie_over_the_queries(instruction_set: str, kv_format: str, rows: tuple[int, int]) -> None:
    """As layers of a decoder have it. Rows of a long text are shared out among threads by spans too."""
    geometry = Geometry(6, 2, 64, kv_format)
    pool = Pool(geometry, 40)
    sequence = pool.add(*random_sequence(geometry, NUM_TOKENS, seed=3))
    pieces, ops = [Piece(sequence, *rows)], NativeOps(4, instruction_set)
    heads = sequence.q[rows[0] : rows[1]].copy()
    ops.paged_attention(heads, batch_of(pieces), pool.kv, 0.125, heads)
    assert_same_bits(heads, attend(ops, pool, pieces, 0.125))
