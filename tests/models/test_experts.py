"""Who is chosen among experts, and that a row's sum does not depend on its neighbours."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.models.experts import (
    Choice,
    Expert,
    GroupChoice,
    add_experts,
    choose_by_softmax,
    choose_in_groups,
    most_likely,
    normalised,
)
from octavo.models.step_rows import Scratch
from tests.models.tiny_models import F32

HIDDEN, INNER, EXPERTS, CHOSEN = 48, 32, 6, 3


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return NativeOps(2)


@pytest.fixture(scope="module")
def experts(ops: NativeOps) -> list[Expert]:
    return [
        Expert(
            ops.pack_linear(normal(10 + index, 2 * INNER, HIDDEN), None, "f32"),
            ops.pack_linear(normal(50 + index, HIDDEN, INNER), None, "f32"),
        )
        for index in range(EXPERTS)
    ]


def test_of_equals_the_lower_index() -> None:
    scores = np.array([[1, 3, 3, 0], [2, 2, 2, 2]], np.float32)
    assert most_likely(scores, 3).tolist() == [[1, 2, 0], [0, 1, 2]]


def test_normalised_rows_add_up_to_one_whoever_is_beside_them() -> None:
    weights = np.abs(normal(1, 50, 7))
    found = normalised(weights)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-6)
    for index in range(50):
        assert np.array_equal(normalised(weights[index : index + 1])[0], found[index])


@pytest.mark.parametrize("by_best_two", [False, True])
def test_groups_that_do_best(by_best_two: bool) -> None:
    """Against a plain loop over rows."""
    likely, shape = normal(2, 40, 12), GroupChoice(num_chosen=4, num_groups=4, num_kept_groups=2)
    found = choose_in_groups(likely, shape, by_best_two=by_best_two)
    for row, chosen in zip(likely, found, strict=True):
        groups = row.reshape(4, 3)
        best = [sum(sorted(group)[-2:]) if by_best_two else max(group) for group in groups]
        kept = sorted(range(4), key=lambda group: -best[group])[:2]
        allowed = [index for index in range(12) if index // 3 in kept]
        assert chosen.tolist() == sorted(allowed, key=lambda index: -row[index])[:4]


def test_one_group_is_no_limit() -> None:
    likely = normal(3, 20, 8)
    assert np.array_equal(choose_in_groups(likely, GroupChoice(3), by_best_two=False), most_likely(likely, 3))


@pytest.mark.parametrize("limit", [None, 1.5])
def test_the_weighted_sum(limit: float | None, ops: NativeOps, experts: list[Expert]) -> None:
    x = normal(4, 30, HIDDEN)
    choice = choose_by_softmax(ops, normal(5, 30, EXPERTS), CHOSEN, normalises=True)
    found = add_experts(ops, Scratch(), x, choice, experts, limit=limit)
    for row in range(30):
        total = np.zeros(HIDDEN)
        for expert, weight in zip(choice.indices[row], choice.weights[row], strict=True):
            gate, up = np.split(x[row].astype(np.float64) @ normal(10 + expert, 2 * INNER, HIDDEN).T, 2)
            if limit is None:
                inner = gate / (1 + np.exp(-gate)) * up
            else:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
                inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            total += weight * (inner @ normal(50 + expert, HIDDEN, INNER).T)
        np.testing.assert_allclose(found[row], total, rtol=1e-4, atol=1e-3)


def test_a_row_gets_the_same_bits_in_any_company(ops: NativeOps, experts: list[Expert]) -> None:
    x, scores = normal(6, 64, HIDDEN), normal(7, 64, EXPERTS)
    choice = choose_by_softmax(ops, scores, CHOSEN, normalises=False)
    whole, scratch = add_experts(ops, Scratch(), x, choice, experts), Scratch()
    for rows in ([3], [3, 4], [63, 3, 9], list(range(40))):
        own = choose_by_softmax(ops, scores[rows], CHOSEN, normalises=False)
        assert np.array_equal(own.weights, choice.weights[rows])
        found = add_experts(ops, scratch, x[rows], own, experts)
        assert np.array_equal(found, whole[rows])
    turned = Choice(choice.indices[:, ::-1].copy(), choice.weights[:, ::-1].copy())
    assert np.array_equal(add_experts(ops, scratch, x, turned, experts), whole), "added by expert, not by rank"
