"""The drawn tokens of the native kernel are those of the numpy definition, bit for bit, on every instruction set."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.draw import HIGHEST_WEIGHT, DrawSettings, draw_row, weights_of
from octavo.kernels.native import NativeOps, supported_instruction_sets
from octavo.kernels.ops import F32
from octavo.kernels.reference import ReferenceOps

INSTRUCTION_SETS = supported_instruction_sets()
SIZES = [1, 2, 15, 16, 17, 255, 256, 257, 272, 1100, 3001]
LAST_NUMBER = 1.0 - 2.0**-53


@cache
def ops_for(instruction_set: str, num_threads: int = 2) -> NativeOps:
    return NativeOps(num_threads, instruction_set)


def drawn(ops: NativeOps | ReferenceOps, rows: F32, many: list[DrawSettings], must_be_finite: bool = True) -> list[int]:
    """Row i with settings i."""
    table = np.array([[s.temperature, s.top_k, s.top_p, s.min_p, s.number] for s in many], np.float64).reshape(-1, 5)
    out = np.full(len(many), -7, np.int32)
    ops.draw(rows, np.arange(len(many), dtype=np.int32), table, must_be_finite, out)
    return out.tolist()


numbers = st.one_of(st.just(0.0), st.just(LAST_NUMBER), st.floats(0.0, LAST_NUMBER))
temperatures = st.one_of(st.sampled_from([0.0, 1.0, 0.7, 1e-30, 1e-300, 100.0]), st.floats(0.01, 100.0))
choices = st.builds(
    DrawSettings,
    temperature=temperatures,
    top_k=st.one_of(st.sampled_from([-1, 0, 1, 2, 40, 10_000]), st.integers(1, 400)),
    top_p=st.one_of(st.just(1.0), st.sampled_from([1e-9, 0.5, 0.9, 0.95, 0.999999]), st.floats(0.001, 1.0)),
    min_p=st.one_of(st.just(0.0), st.sampled_from([1e-12, 0.05, 1.0]), st.floats(0.0, 1.0)),
    number=numbers,
)


def rows_of(kind: str, seed: int, count: int, size: int) -> F32:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, size)).astype(np.float32) * 3
    if kind == "ties":
        return np.round(rows).astype(np.float32)
    if kind == "flat":
        return np.zeros_like(rows)
    if kind == "peaked":
        rows[np.arange(count), rng.integers(0, size, count)] += 30
    if kind == "wide":
        return (rows * np.float32(1e37)).astype(np.float32)
    if kind == "banned":
        rows[rng.random((count, size)) < 0.5] = -np.inf
    if kind == "zeros":
        rows = np.where(rng.random((count, size)) < 0.5, np.float32(-0.0), np.float32(0.0))
    return rows


@given(
    kind=st.sampled_from(["normal", "ties", "flat", "peaked", "wide", "banned", "zeros"]),
    seed=st.integers(0, 10_000),
    size=st.sampled_from(SIZES),
    many=st.lists(choices, min_size=1, max_size=8),
)
@settings(max_examples=300, deadline=None)
def test_native_draws_what_numpy_draws(kind: str, seed: int, size: int, many: list[DrawSettings]) -> None:
    rows = rows_of(kind, seed, len(many), size)
    must_be_finite = kind != "banned"
    expected = drawn(ReferenceOps(), rows, many, must_be_finite)
    for instruction_set in INSTRUCTION_SETS:
        assert drawn(ops_for(instruction_set), rows, many, must_be_finite) == expected, instruction_set


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("scale", [0.0, 0.5, 2.0, 6.0])
def test_a_large_vocabulary(instruction_set: str, scale: float) -> None:
    """Few likely tokens, and tails so long that the first look is not enough."""
    rng = np.random.default_rng(3)
    rows = (rng.standard_normal((24, 49_152)) * scale).astype(np.float32)
    rows[::3] = np.round(rows[::3], 1)
    fields = [(0, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.999, 0.0), (50, 0.95, 0.0), (20_000, 1.0, 0.0), (5000, 0.9, 1e-5)]
    many = [
        DrawSettings(temperature, *fields[i % 6], number=float(rng.random()))
        for i, temperature in enumerate([0.7, 1.0, 1.3, 5.0] * 6)
    ]
    assert drawn(ops_for(instruction_set), rows, many) == drawn(ReferenceOps(), rows, many)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_weight_is_that_of_numpy(instruction_set: str) -> None:
    """Two tokens: the number at which the draw changes from one to the other is their exact share."""
    rng = np.random.default_rng(5)
    logits = -np.concatenate([np.linspace(0, 24, 400), rng.random(400) * 24]).astype(np.float32)
    ops = ops_for(instruction_set)
    for logit in logits:
        row = np.array([0.0, logit], np.float32)
        weight = float(weights_of(row, np.float32(0.0), 1.0)[1])
        edge = float(HIGHEST_WEIGHT) / (float(HIGHEST_WEIGHT) + weight)
        near = [min(max(edge + step * 2.0**-52, 0.0), LAST_NUMBER) for step in (-8, -2, -1, 0, 1, 2, 8)]
        many = [DrawSettings(1.0, number=number) for number in near]
        rows = np.tile(row, (len(many), 1))
        assert drawn(ops, rows, many) == drawn(ReferenceOps(), rows, many)


def test_weights_are_the_exponential() -> None:
    x = -np.linspace(0, 22, 20_001).astype(np.float32)
    for temperature in (1.0, 0.5, 3.0):
        weights = weights_of(x, np.float32(0.0), temperature)
        exact = np.exp(x.astype(np.float64) / temperature) * 2.0**32
        assert (np.abs(weights - exact) <= 0.51 + exact * 2e-6).all()
        assert (np.diff(weights) <= 0).all() or np.diff(weights).max() <= exact.max() * 1e-6


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", SIZES)
def test_a_row_that_is_not_finite_gives_nothing(instruction_set: str, value: float, size: int) -> None:
    ops = ops_for(instruction_set)
    for place in {0, size // 2, size - 1}:
        rows = np.random.default_rng(1).standard_normal((3, size)).astype(np.float32)
        rows[1, place] = value
        for one in (DrawSettings(0.0), DrawSettings(1.0), DrawSettings(0.8, 5, 0.9, 0.1, 0.5)):
            many = [one] * 3
            expected = drawn(ReferenceOps(), rows, many)
            assert expected[1] == -1
            assert -1 not in (expected[0], expected[2])
            assert drawn(ops, rows, many) == expected


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_row_without_a_finite_logit_gives_nothing(instruction_set: str) -> None:
    rows = np.full((2, 300), -np.inf, np.float32)
    rows[1, 7] = np.inf
    for one in (DrawSettings(0.0), DrawSettings(1.0, 3)):
        assert drawn(ops_for(instruction_set), rows, [one] * 2, must_be_finite=False) == [-1, -1]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_row_does_not_depend_on_its_batch_its_place_or_the_threads(instruction_set: str) -> None:
    rng = np.random.default_rng(2)
    rows = (rng.standard_normal((40, 3001)) * 3).astype(np.float32)  # an odd width: every row at another alignment
    many = [
        DrawSettings([0.0, 1.0, 0.8][i % 3], [0, 40][i % 2], [1.0, 0.9][i % 4 // 2], 0.0, float(rng.random()))
        for i in range(40)
    ]
    together = drawn(ops_for(instruction_set), rows, many)
    assert together == drawn(ops_for(instruction_set, 1), rows, many) == drawn(ops_for(instruction_set, 4), rows, many)
    alone = [drawn(ops_for(instruction_set), row[None].copy(), [one])[0] for row, one in zip(rows, many, strict=True)]
    assert alone == together
    assert together == [draw_row(row, one) for row, one in zip(rows, many, strict=True)]


def test_rows_are_taken_by_index() -> None:
    rows = np.eye(5, 40, dtype=np.float32)
    out = np.empty(3, np.int32)
    NativeOps(1).draw(rows, np.array([4, 0, 4], np.int32), np.zeros((3, 5)), True, out)
    assert out.tolist() == [4, 0, 4]


def test_numbers_are_those_of_the_seeds() -> None:
    seeds, positions = [0, 1, 2**63 - 1, 2**64 - 1, -3, 12345], [0, 9, 1, 2**40, 5, 0]
    expected = ReferenceOps().uniform_numbers(seeds, positions, 0x6F637461766F0001)
    assert NativeOps(1).uniform_numbers(seeds, positions, 0x6F637461766F0001).tobytes() == expected.tobytes()
    assert len(set(expected.tolist())) == len(seeds)
    assert ((expected >= 0) & (expected < 1)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": np.array([2], np.int32)}, "outside the logits"),
        ({"rows": np.array([-1], np.int32)}, "outside the logits"),
        ({"settings": np.zeros((1, 4))}, "must be"),
        ({"settings": np.zeros((2, 5))}, "same length"),
        ({"out": np.empty(2, np.int32)}, "same length"),
        ({"logits": np.zeros((2, 0), np.float32)}, "columns"),
    ],
)
def test_what_the_binding_refuses(changes: dict[str, np.ndarray], message: str) -> None:
    given = {
        "logits": np.zeros((2, 8), np.float32),
        "rows": np.zeros(1, np.int32),
        "settings": np.zeros((1, 5)),
        "must_be_finite": True,
        "out": np.empty(1, np.int32),
    }
    with pytest.raises(ValueError, match=message):
        NativeOps(1).draw(**{**given, **changes})  # type: ignore[arg-type]
