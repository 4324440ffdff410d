"""What attention has chosen of one request, and what has been counted for the next choice. It outlives preemptions.

The bytes are the executor's; nothing here looks into them. An executor that computes nothing gives none.
"""

from __future__ import annotations

from octavo.core.selection import SelectionPlan
from octavo.core.step import Weighed, Weighing


class Kept:
    """Belongs to one request. Invariant: what was chosen once is never chosen again, but replayed."""

    __slots__ = ("drops", "keep_lists", "mass", "num_weighed_tokens")

    def __init__(self, drops: SelectionPlan) -> None:
        self.drops = drops
        self.keep_lists: list[bytes] = []  # of each drop so far, in order
        self.mass = b""  # attention that the queries of positions first_weighed to num_weighed_tokens gave
        self.num_weighed_tokens = drops.first_weighed

    @property
    def max_hit_tokens(self) -> int:
        """As many may come from the cache: the queries of those behind are still to be counted."""
        return self.num_weighed_tokens

    def weighing(self, start: int, end: int) -> Weighing | None:
        """What a row of positions [start, end) has to count; None: all of it has been counted."""
        first = max(start, self.num_weighed_tokens)
        if first >= end:
            return None
        assert first == self.num_weighed_tokens, f"positions {self.num_weighed_tokens} to {first} were never counted"
        ends_at_drop = self.drops.num_drops(end) > self.drops.num_drops(end - 1)
        return Weighing(first - start, self.mass, self.drops.choice if ends_at_drop else None)

    def take(self, weighing: Weighing, end: int, weighed: Weighed | None) -> None:
        """What an executor gave for a row that ends at `end`."""
        self.num_weighed_tokens = end
        self.mass = b"" if weighed is None else weighed.mass
        if weighing.choice is not None:
            self.keep_lists.append(weighed.keep_list or b"" if weighed is not None else b"")
            if self.drops.next_drop(end) is None:
                self.mass, self.num_weighed_tokens = b"", NOTHING_MORE

    def keep_list(self, num_computed: int) -> bytes:
        """What is kept at the last drop at or before so many tokens."""
        return self.keep_lists[self.drops.num_drops(num_computed) - 1]


NOTHING_MORE = 1 << 62  # tokens: no query counts any more
