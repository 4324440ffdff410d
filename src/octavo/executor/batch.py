"""StepPlan -> the arrays that a model runs on. It does not know the model, and keeps nothing between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from octavo.core.step import BlockCopy, Row
from octavo.kernels.ops import I32, AttentionBatch, WeighedRows


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The rows of a step in the order of the plan, one sequence of the attention batch to each."""

    token_ids: I32  # [num_tokens]
    attention: AttentionBatch
    logits_rows: I32  # indices of the tokens whose logits are wanted: see `num_scored`


def build_batch(rows: Sequence[Row], block_size: int, weighed: tuple[WeighedRows, ...] = ()) -> StepBatch:
    """rows: at least one, each with at least one token, of ids that fit 32 bits."""
    num_rows = len(rows)
    lengths = [len(row.token_ids) for row in rows]
    starts = list(accumulate(lengths, initial=0))
    query_start = np.array(starts, np.int32)
    token_ids = np.fromiter(chain.from_iterable([row.token_ids for row in rows]), np.int32, starts[-1])
    start_position = np.array([row.start for row in rows], np.int32)
    dropped = [row.dropped[1] for row in rows]
    start_slot = start_position - np.array(dropped, np.int32) if any(dropped) else None
    num_blocks = [
        -(-(row.start - gone + length) // block_size) for row, length, gone in zip(rows, lengths, dropped, strict=True)
    ]
    block_tables = np.zeros((len(rows[0].block_tables), num_rows, max(num_blocks)), np.int32)
    for index, (row, count) in enumerate(zip(rows, num_blocks, strict=True)):
        for group, table in enumerate(row.block_tables):
            block_tables[group, index, :count] = np.frombuffer(table, np.int32, count)
    np.maximum(block_tables, 0, out=block_tables)  # what a window has passed (GONE) is never read
    wanted: list[int] = []
    for row, begin, end in zip(rows, starts, starts[1:], strict=False):
        if row.prompt_scores is not None:
            first = begin + row.prompt_scores.first
            wanted += range(first, first + num_scored(row))
        if is_sampled(row):
            wanted.append(end - 1)
    logits_rows = np.array(wanted, np.int32)
    attention = AttentionBatch(query_start, start_position, block_tables, start_slot, weighed)
    return StepBatch(token_ids, attention, logits_rows)


def num_scored(row: Row) -> int:
    """Rows of logits that tell about the prompt; they come before the one that is drawn from."""
    return 0 if row.prompt_scores is None else len(row.prompt_scores.targets)


def is_sampled(row: Row) -> bool:
    """Whether somebody draws from the logits of the row's last token."""
    return row.sample is not None or bool(row.branch_samples)


def build_copies(copies: Sequence[BlockCopy]) -> tuple[I32, I32]:
    """Sources and targets, in the order of the plan."""
    count = len(copies)
    return (
        np.fromiter((copy.source for copy in copies), np.int32, count),
        np.fromiter((copy.target for copy in copies), np.int32, count),
    )
