"""How much attention each slot gets: against double precision, and the same whole numbers however it is computed."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.executor.memory_plan import counting_scratch_bytes
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import I64, MASS_UNITS, Ops, WeighedRows
from octavo.kernels.reference import ReferenceOps
from octavo.kv_formats import layout
from tests.kernels.paged_case import CASES, FEW_CASES, Geometry, Piece, Pool, Stored, batch_of, holds, random_sequence

# Formats in which a token has bytes of its own: with others no tokens are dropped.
BY_TOKEN = ("f32", "bf16", "f16", "fp8_e4m3", "fp8_e5m2", "int8", "k8v4")
cases, few_cases = (
    pytest.mark.parametrize(("instruction_set", "kv_format"), [one for one in all_ if one.values[1] in BY_TOKEN])
    for all_ in (CASES, FEW_CASES)
)
SHAPES = [(9, 3, 64), (2, 2, 48), (8, 1, 32)]


def mass_of(ops: Ops, pool: Pool, pieces: list[Piece], index: int = 0, first: int = 0, into: I64 | None = None) -> I64:
    """Of piece `index` of a call, from its row `first` on: added to `into`, or to zeros."""
    piece = pieces[index]
    mass = np.zeros((pool.geometry.num_kv_heads, len(piece.sequence.q)), np.int64) if into is None else into
    q = np.concatenate([one.sequence.q[one.first : one.end] for one in pieces])
    rows = WeighedRows(index, first, mass[None])
    ops.attention_mass(q, batch_of(pieces), pool.kv, pool.geometry.head_dim**-0.5, rows, 0)
    return mass


def mass_f64(pool: Pool, sequence: Stored, first: int) -> np.ndarray:
    """[num_kv_heads, num_tokens], of rows from `first` on, as attention weights."""
    geometry, num_tokens = pool.geometry, len(sequence.q)
    k, _ = layout.read_tokens(pool.kv, np.array(sequence.blocks, np.int32), num_tokens)
    mass = np.zeros((geometry.num_kv_heads, num_tokens))
    for row in range(first, num_tokens):
        q = sequence.q[row].astype(np.float64).reshape(geometry.num_kv_heads, -1, geometry.head_dim)
        scores = geometry.head_dim**-0.5 * np.einsum("hgd,hnd->hgn", q, k[:, : row + 1].astype(np.float64))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mass[:, : row + 1] += (weights / weights.sum(-1, keepdims=True)).sum(1)
    return mass


@cases
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_it_is_the_sum_of_the_softmax(
    instruction_set: str, kv_format: str, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    if not holds(kv_format, head_dim):
        pytest.skip("heads of this size are refused")
    pool = Pool(Geometry(num_heads, num_kv_heads, head_dim, kv_format), 40)
    sequence = pool.add(*random_sequence(pool.geometry, 301, seed=1))
    found = mass_of(NativeOps(2, instruction_set), pool, [Piece(sequence, 200, 301)], first=30)
    expected = mass_f64(pool, sequence, 230)
    rounded_q = instruction_set == "avx512_bf16" and kv_format not in ("f32", "f16")
    assert np.abs(found / MASS_UNITS - expected).max() < (0.1 if rounded_q else 1e-4)
    assert np.abs(found.sum(1) / MASS_UNITS - 71 * num_heads / num_kv_heads).max() < 1e-3, "each weight counts once"


@pytest.mark.parametrize("scales", [False, True])
def test_the_reference_means_the_same(scales: bool) -> None:
    geometry = Geometry(4, 2, 32, "fp8_e4m3" if scales else "f32")
    rng = np.random.default_rng(5)
    channel = tuple(rng.uniform(0.5, 2, (2, 32)).astype(np.float32) for _ in range(2)) if scales else None
    pool = Pool(geometry, 12, scales=channel)  # type: ignore[arg-type]
    sequence = pool.add(*random_sequence(geometry, 70, seed=2))
    pieces = [Piece(sequence, 20, 70)]
    native, reference = (mass_of(ops, pool, pieces) for ops in (NativeOps(1, "portable"), ReferenceOps()))
    assert np.abs(native - reference).max() < 1e-4 * MASS_UNITS


@few_cases
def test_steps_threads_and_strangers_change_nothing(instruction_set: str, kv_format: str) -> None:
    geometry = Geometry(9, 3, 64, kv_format)
    pool = Pool(geometry, 60)
    sequence = pool.add(*random_sequence(geometry, 400, seed=3))
    stranger = pool.add(*random_sequence(geometry, 77, seed=4))
    expected = mass_of(NativeOps(1, instruction_set), pool, [Piece(sequence, 0, 400)])
    for threads, chunk in ((2, 400), (4, 64), (2, 7), (3, 1)):
        ops, mass = NativeOps(threads, instruction_set), np.zeros_like(expected)
        for first in range(0, 400, chunk):
            pieces = [Piece(stranger, 0, 77), Piece(sequence, first, min(400, first + chunk)), Piece(stranger, 76, 77)]
            mass_of(ops, pool, pieces, 1, into=mass)
        assert np.array_equal(mass, expected), (threads, chunk)


@cases
def test_its_scratch_is_within_the_plan(instruction_set: str, kv_format: str) -> None:
    """Law 2: few slots, where a piece has many rows, and many, where it has one; few threads and several."""
    for num_heads, num_kv_heads, head_dim, num_tokens in ((9, 3, 64, 40), (32, 1, 128, 600), (8, 2, 256, 5000)):
        if not holds(kv_format, head_dim):
            continue
        pool = Pool(Geometry(num_heads, num_kv_heads, head_dim, kv_format), -(-num_tokens // 16))
        sequence = pool.add(*random_sequence(pool.geometry, num_tokens, seed=1))
        for num_threads in (1, 3):
            ops = NativeOps(num_threads, instruction_set)
            mass_of(ops, pool, [Piece(sequence, num_tokens - 20, num_tokens)])
            planned = counting_scratch_bytes(num_tokens, num_heads // num_kv_heads, head_dim, num_threads)
            assert planned / 8 < ops.scratch_bytes <= planned


def test_what_does_not_fit_is_refused() -> None:
    pool = Pool(Geometry(4, 2, 32), 12)
    sequence = pool.add(*random_sequence(pool.geometry, 40, seed=2))
    pieces, ops = [Piece(sequence, 30, 40)], NativeOps(1)
    for mass in (np.zeros((2, 39), np.int64), np.zeros((1, 40), np.int64)):
        with pytest.raises(ValueError, match="mass must be"):
            mass_of(ops, pool, pieces, into=mass)
    with pytest.raises(ValueError, match="first_row"):
        mass_of(ops, pool, pieces, first=11)
    assert not mass_of(ops, pool, pieces, first=10).any(), "no rows, no mass"
