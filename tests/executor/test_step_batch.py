"""StepPlan -> arrays, against the plain reading of the contract."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import BlockCopy, Row, SampleSpec
from octavo.executor.batch import build_batch, build_copies

SAMPLE = SampleSpec(SamplingParams(), 0, 0)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[Row], int]:
    block_size, num_groups = draw(st.sampled_from([16, 32])), draw(st.integers(1, 3))
    found = []
    for index in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, 100))
        token_ids = tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)))
        needed = -(-(start + len(token_ids)) // block_size)
        block_ids = st.lists(st.integers(1, 999), min_size=needed, max_size=needed + 3)
        tables = tuple(array("i", draw(block_ids)) for _ in range(num_groups))
        found.append(Row(f"r{index}", start, token_ids, tables, draw(st.sampled_from([None, SAMPLE]))))
    return found, block_size


@given(rows())
@settings(max_examples=100, deadline=None)
def test_arrays_say_what_the_rows_say(case: tuple[list[Row], int]) -> None:
    plan_rows, block_size = case
    batch = build_batch(plan_rows, block_size)
    assert batch.token_ids.tolist() == [token_id for row in plan_rows for token_id in row.token_ids]
    starts = batch.attention.query_start.tolist()
    assert starts[0] == 0
    assert np.diff(starts).tolist() == [len(row.token_ids) for row in plan_rows]
    assert batch.attention.start_position.tolist() == [row.start for row in plan_rows]
    for index, row in enumerate(plan_rows):
        needed = -(-(row.start + len(row.token_ids)) // block_size)
        for group, table in enumerate(row.block_tables):
            assert batch.attention.block_tables[group, index, :needed].tolist() == list(table[:needed])
            assert not batch.attention.block_tables[group, index, needed:].any()
    assert batch.attention.block_tables.shape[0] == len(plan_rows[0].block_tables)
    expected = [starts[i + 1] - 1 for i, row in enumerate(plan_rows) if row.sample is not None]
    assert batch.logits_rows.tolist() == expected
    for array_ in (batch.token_ids, batch.logits_rows, batch.attention.block_tables, batch.attention.query_start):
        assert array_.dtype == np.int32
        assert array_.flags.c_contiguous


def test_the_table_is_a_snapshot() -> None:
    """A table that core changes after the plan is made does not change the batch."""
    table = array("i", [3, 4])
    batch = build_batch([Row("r", 20, (1,), (table,), SAMPLE)], 16)
    table[0] = 9
    assert batch.attention.block_tables.tolist() == [[[3, 4]]]
    table.append(5)  # the buffer is not held: growing works


def test_copies_keep_their_order() -> None:
    sources, targets = build_copies((BlockCopy(1, 2, 5), BlockCopy(3, 1, 16)))
    assert sources.tolist() == [1, 3]
    assert targets.tolist() == [2, 1]
    assert build_copies(())[0].dtype == np.int32
