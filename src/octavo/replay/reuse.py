"""Reuse distances: how large a cache must be for each lookup to be a hit. One pass gives every size.

The cache is the engine's: least recently used, leaf first. A request looks all its blocks up at once, against what
the requests before it left; then it lets them go from its last block to its first, output before prompt. So the blocks
stand in one order, latest first, whatever the size of the cache (Mattson et al., "Evaluation techniques for storage
hierarchies", IBM Systems Journal 9, 1970), and a block is a hit where it stands within the size. What requests hold
while they run is not known here: that is the timed mode's.

Lookups are worked through in batches: within a batch by `dominance`, before it by the order kept from the batch before.
Memory is in proportion to the largest cache that is asked about, not to the trace.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.replay.dominance import I64, sums_below

NEVER = -1  # the distance of a block that was not there at all, or too deep to be asked about
_BATCH = 1 << 17


@dataclass(frozen=True, slots=True)
class Lookups:
    """What came of a batch: one entry for each lookup, in order."""

    distances: I64  # weight of the cache that the hit needs, the block itself included; NEVER
    tags: I64  # as given, from 0 on


class ReuseDistances:
    """Feed requests with `add`, take what is finished with `take`; `flush` at the end.

    Weights are what a cache's size is measured in: 1 for each block, or its tokens.
    """

    def __init__(self, max_weight: int | None = None) -> None:
        """max_weight: the largest cache that is of interest; deeper blocks are forgotten. None: all are kept."""
        self._max_weight = max_weight
        # Invariant: block -> its place in the order, of all blocks that are kept; a later place is more recent.
        self._place: dict[Hashable, int] = {}
        self._weight_of: I64 = np.zeros(0, np.int64)  # by place; 0 where nobody stands any more
        self._keys: list[Hashable] = []  # touches of the batch: block, weight, where its request began, tag
        self._weights: list[int] = []
        self._starts: list[int] = []
        self._tags: list[int] = []
        self._done: list[Lookups] = []

    @property
    def num_kept(self) -> int:
        return len(self._place)

    def add(
        self,
        names: Sequence[Hashable],
        weights: Sequence[int],
        tags: Sequence[int],
        produced: Sequence[Hashable] = (),
        produced_weight: int = 1,
    ) -> None:
        """One request: the blocks of its prompt, in order, and those that it leaves behind them. No block twice.

        tags: numbers that are given back with the distances, one for each block of the prompt.
        """
        start, count, more = len(self._keys), len(names), len(produced)
        if more:
            self._keys += produced[::-1]
            self._weights += [produced_weight] * more
        self._keys += names[::-1]
        self._weights += weights[::-1]
        self._starts += [start] * (count + more)
        self._tags += [NEVER] * more
        self._tags += tags[::-1]
        if len(self._keys) >= _BATCH:
            self.flush()

    def take(self) -> list[Lookups]:
        """What has been worked through since the last call. Lookups of one request stand from its last block on."""
        done, self._done = self._done, []
        return done

    def flush(self) -> None:
        """Work through what was added."""
        if not self._keys:
            return
        base = len(self._weight_of)
        place, get = self._place, self._place.get
        found = []
        for at, key in enumerate(self._keys, base):
            found.append(get(key, NEVER))
            place[key] = at
        previous = np.array(found, np.int64)
        weights = np.array(self._weights, np.int64)
        starts = np.array(self._starts, np.int64)
        tags = np.array(self._tags, np.int64)
        asked = np.flatnonzero(tags != NEVER)
        distances = np.full(len(asked), NEVER, np.int64)
        known = previous[asked] != NEVER
        hits = asked[known]
        distances[known] = self._distances(previous, weights, hits, starts[hits], base) + weights[hits]
        if self._max_weight is not None:
            distances[distances > self._max_weight] = NEVER
        self._done.append(Lookups(distances, tags[asked]))
        self._compact(previous, weights)
        self._keys.clear()
        for column in (self._weights, self._starts, self._tags):
            column.clear()

    def _distances(self, previous: I64, weights: I64, hits: I64, starts: I64, base: int) -> I64:
        """The weight of the different blocks that were touched after previous[hit] and before its request began.

        A block counts at its first touch after that place: where its own previous touch was before it. In the order
        that was kept each block stands once, so all that stand behind the place count but those touched again since.
        """
        at = previous[hits]
        behind = np.zeros(base + 1, np.int64)  # weight of kept places from here on
        behind[:-1] = np.cumsum(self._weight_of[::-1])[::-1]
        in_order = np.where(at < base, behind[np.minimum(at + 1, base)], 0)
        ranks = previous + 1  # from 0 on; 0: never touched
        in_batch = sums_below(ranks, weights, starts, at + 2)
        # Touches of the batch up to a place inside it have their previous touches before it: all were counted.
        cumulative = np.zeros(len(weights) + 1, np.int64)
        np.cumsum(weights, out=cumulative[1:])
        inside = np.maximum(at - base + 1, 0)
        return in_order + in_batch - cumulative[inside]

    def _compact(self, previous: I64, weights: I64) -> None:
        """Close the gaps that moved blocks left, and forget what lies too deep."""
        everything = np.concatenate((self._weight_of, weights))
        everything[previous[previous != NEVER]] = 0
        alive = everything > 0
        if self._max_weight is not None:
            depth = np.cumsum(everything[::-1])[::-1]
            alive &= depth <= self._max_weight
        renumbered = np.cumsum(alive) - 1
        moved = np.where(alive, renumbered, NEVER).tolist()
        self._place = {key: moved[at] for key, at in self._place.items() if moved[at] != NEVER}
        self._weight_of = everything[alive]
