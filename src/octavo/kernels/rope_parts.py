"""Sequences that have dropped tokens, taken apart so that each is rotated by its position and stored in its slot.

The kernel knows one number for both. A sequence that has dropped d tokens is a batch of its own with a rope table that
starts d positions later. Rows are computed alone, so taking them apart changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from octavo.kernels.ops import I32, AttentionBatch, RopeTable


@dataclass(frozen=True, slots=True)
class RopePart:
    """Rows of sequences that have dropped equally many tokens."""

    rows: slice
    sequences: slice
    query_start: I32
    start_slot: I32
    rope: RopeTable


def rope_parts(batch: AttentionBatch, rope: RopeTable) -> list[RopePart]:
    """The whole batch as one part where nothing was dropped."""
    if batch.start_slot is None:
        return [RopePart(slice(None), slice(None), batch.query_start, batch.start_position, rope)]
    dropped = batch.start_position - batch.start_slot
    edges = [0, *(np.flatnonzero(np.diff(dropped)) + 1).tolist(), len(dropped)]
    parts = []
    for first, end in pairwise(edges):
        begin, count = batch.query_start[first], int(dropped[first])
        rows = slice(int(begin), int(batch.query_start[end]))
        table = RopeTable(rope.cos[count:], rope.sin[count:])
        query_start = batch.query_start[first : end + 1] - begin
        parts.append(RopePart(rows, slice(first, end), query_start, batch.start_slot[first:end], table))
    return parts
