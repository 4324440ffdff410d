"""Mixtures of experts: who is chosen, and the sum of what the chosen ones say. It knows no family and no file.

Every row is on its own (law 1): scores are compared within the row, and the experts' outputs are added in ascending
order of the expert, whoever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.kernels.ops import F32, I32, Ops, PackedLinear
from octavo.models.step_rows import Scratch


@dataclass(frozen=True, slots=True)
class Expert:
    gate_up: PackedLinear  # hidden_size -> gate | up
    down: PackedLinear  # expert_size -> hidden_size


@dataclass(frozen=True, slots=True)
class Choice:
    """Of every row, the experts that it goes to and the weight of each."""

    indices: I32  # [num_rows, num_chosen]
    weights: F32  # [num_rows, num_chosen]


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """How many experts a row goes to, and of how many groups of equal size they may be."""

    num_chosen: int
    num_groups: int = 1
    num_kept_groups: int = 1


def most_likely(scores: F32, count: int) -> I32:
    """[num_rows, count]: the highest of each row, highest first; of equals the one with the lower index."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :count].astype(np.int32)


def normalised(weights: F32, least: float = 0.0) -> F32:
    """Each row divided by its sum (and what stands for a sum of nothing)."""
    total = weights[:, 0].copy()
    for column in range(1, weights.shape[1]):  # in one order, for any number of rows
        total += weights[:, column]
    return weights / (total + np.float32(least))[:, np.newaxis]


def choose_by_softmax(ops: Ops, scores: F32, count: int, *, normalises: bool) -> Choice:
    """Softmax over all experts, the `count` most likely, whose weights may be made to add up to 1."""
    likely = np.empty_like(scores)
    ops.softmax(scores, likely)
    indices = most_likely(likely, count)
    weights = np.take_along_axis(likely, indices, axis=1)
    return Choice(indices, normalised(weights) if normalises else weights)


def add_experts(
    ops: Ops, scratch: Scratch, x: F32, choice: Choice, experts: Sequence[Expert], *, limit: float | None = None
) -> F32:
    """[num_rows, hidden_size]: for each row of x, the weighted sum over its experts.

    limit None: down(silu(gate) * up); a number: the clamped swiglu of gpt-oss.
    """
    total = np.zeros((len(x), experts[0].down.num_outputs), np.float32)
    for index in np.unique(choice.indices):
        expert = experts[index]
        rows, places = np.nonzero(choice.indices == index)
        gate_up = scratch.rows("expert_gate_up", len(rows), expert.gate_up.num_outputs)
        inner = scratch.rows("expert_inner", len(rows), expert.down.num_inputs)
        found = scratch.rows("expert_found", len(rows), expert.down.num_outputs)
        ops.linear(x[rows], expert.gate_up, gate_up)
        if limit is None:
            ops.silu_mul(gate_up, inner)
        else:
            ops.gated_activation(gate_up, "clamped_swiglu", inner, limit=limit)
        ops.linear(inner, expert.down, found)
        found *= choice.weights[rows, places, np.newaxis]
        total[rows] += found
    return total


def choose_in_groups(likely: F32, shape: GroupChoice, *, by_best_two: bool) -> I32:
    """[num_rows, num_chosen]: the most likely experts of the groups that do best.

    A group does as well as its best expert (DeepSeek-V2), or as its best two together (V3).
    """
    groups = likely.reshape(len(likely), shape.num_groups, -1)
    ordered = np.sort(groups, axis=2)
    best = ordered[:, :, -1] + ordered[:, :, -2] if by_best_two else ordered[:, :, -1]
    kept = most_likely(best, shape.num_kept_groups)
    allowed = np.zeros(groups.shape, np.bool_)
    np.put_along_axis(allowed, kept[:, :, np.newaxis], values=True, axis=1)
    limited = np.where(allowed, groups, np.float32(-np.inf)).reshape(likely.shape)
    return most_likely(limited, shape.num_chosen)
