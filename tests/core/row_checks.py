"""What must be true of a row that runs: who writes where, and what of the text is gone."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING

from octavo.core.heavy_hitters import HeavyHitters
from octavo.core.keep_policy import KeepPolicy
from octavo.core.snap_kv import SnapKV
from octavo.core.step import Row
from octavo.core.streaming import StreamingLLM
from tests.core.shadow import Shadow
from tests.core.structure_checks import indexed_blocks

if TYPE_CHECKING:
    from tests.core.core_harness import Harness


def check_writer(harness: Harness, row: Row) -> None:
    """Blocks that are written are held by their writer alone, and nobody can hit them."""
    size, indexed = harness.spec.block_size, indexed_blocks(harness)
    for table in row.block_tables:
        start = row.start - row.dropped[1]
        for block in table[start // size : -(-(start + len(row.token_ids)) // size)]:
            assert harness.blocks.pool.ref_count[block] == 1, f"{row.request_id} writes block {block} that others hold"
            assert block not in indexed, f"{row.request_id} writes block {block} that can be hit"


def check_drops(harness: Harness, row: Row) -> None:
    """At fixed places of the text, whatever the steps are: every token of the row reads the same."""
    shadow = harness.shadows.get(row.request_id)
    keep = shadow.keep if shadow is not None else None
    if keep is None:
        assert row.dropped == (0, 0)
        return
    if not isinstance(keep, StreamingLLM):
        assert shadow is not None
        check_choices(harness, row, shadow, keep)
        return
    sinks, recent, piece = (harness.whole(part) for part in astuple(keep))
    gone = {
        max(0, (position - sinks - recent) // piece) * piece
        for position in range(row.start, row.start + len(row.token_ids))
    }
    assert {row.dropped} == {(sinks, count) for count in gone}
    assert all(len(table) * harness.spec.block_size <= sinks + recent + piece for table in row.block_tables)


def check_choices(harness: Harness, row: Row, shadow: Shadow, keep: KeepPolicy) -> None:
    """As `_check_drops`; and every query counts once, every choice is made once, whatever is computed again."""
    gone, num_prompt, end = set[int](), len(shadow.prompt), row.start + len(row.token_ids)
    if isinstance(keep, SnapKV):
        first, is_drop = num_prompt - keep.window, end == num_prompt > keep.budget
        for position in range(row.start, end):
            gone.add(max(0, num_prompt - keep.budget) if position >= num_prompt else 0)
    else:
        assert isinstance(keep, HeavyHitters)
        held = keep.budget + keep.piece
        first, is_drop = 0, end >= held and (end - held) % keep.piece == 0
        for position in range(row.start, end):
            gone.add(0 if position < held else (position - held) // keep.piece * keep.piece + keep.piece)
    (count,) = gone
    assert row.dropped == ((-1, count) if count else (0, 0))
    if row.weighing is None:
        assert not is_drop or end in shadow.chosen_at or num_prompt + shadow.params.max_tokens - 1 <= end
        return
    begin = row.start + row.weighing.first
    assert begin == (first if shadow.num_weighed is None else shadow.num_weighed), "queries count once each"
    assert bool(row.weighing.mass) is (shadow.num_weighed is not None), "what was counted before is lost"
    shadow.num_weighed = end
    assert (row.weighing.choice is not None) is is_drop
    if is_drop:
        assert end not in shadow.chosen_at, "it was chosen before what stays"
        shadow.chosen_at.add(end)
