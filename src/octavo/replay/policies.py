"""Eviction policies to compare with the engine's own. Each is a `core.eviction.EvictionPolicy`.

Every policy lets a block go only after the idle blocks below it, as prefixes need; within that it may choose. They hear
the core's events, for what an idle block was worth while it was held, and know no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain

from octavo.core import events
from octavo.core.eviction import EvictionPolicy, LeastRecentlyUsed
from octavo.errors import ConfigError

POLICIES = ("lru", "lfu", "priority")
Rank = Callable[[int], int]


class Ranked:
    """First what windows have passed, then the idle block of the lowest rank; among equals, the one idle for longest.

    Invariant: an idle block's key is above those of the idle blocks below it. So a rank must never be lower for a block
    than for one below it while both are idle; keys are made when blocks become idle, from the tail of a path on, and a
    block whose rank is too low is given that of the one below.
    """

    __slots__ = ("_count", "_heap", "_keys", "_passed", "_rank")

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._keys: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], int]] = []  # with keys that are no longer true
        self._count = 0
        self._passed: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._keys) + len(self._passed)

    def __iter__(self) -> Iterator[int]:
        return chain(self._passed, sorted(self._keys, key=lambda block: self._keys[block]))

    def add(self, block_ids: Sequence[int]) -> None:
        lowest = -(1 << 62)
        for block_id in block_ids:
            lowest = max(lowest, self._rank(block_id))
            self._count += 1
            key = self._keys[block_id] = (lowest, self._count)
            heappush(self._heap, (key, block_id))

    def remove(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if block_id in self._passed:
                del self._passed[block_id]
            else:
                del self._keys[block_id]
        if len(self._heap) > 2 * len(self._keys) + 64:
            self._heap = [(key, block_id) for block_id, key in self._keys.items()]
            heapify(self._heap)

    def add_passed(self, block_ids: Sequence[int]) -> None:
        self._passed.update(dict.fromkeys(block_ids))

    def pop_passed(self, count: int) -> list[int]:
        taken = list(self._passed)[:count]
        for block_id in taken:
            del self._passed[block_id]
        return taken

    def pop(self, count: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:
            key, block_id = heappop(self._heap)
            if self._keys.get(block_id) == key:
                del self._keys[block_id]
                taken.append(block_id)
        return taken


class Uses:
    """How often each cached block has been held since it was committed: a listener of the core's events.

    Whoever holds a block holds those above it, so the uses of a block are at least those of a block below.
    """

    def __init__(self, num_blocks: int) -> None:
        self.counts = [0] * num_blocks

    def __call__(self, event: events.Event) -> None:
        counts = self.counts
        if isinstance(event, events.PrefixAttached):
            for table in event.block_tables:
                for block_id in table:
                    if block_id >= 0:
                        counts[block_id] += 1
        elif isinstance(event, events.BlocksCommitted):
            for block in event.blocks:
                for block_id in block.block_ids:
                    if block_id >= 0:
                        counts[block_id] = 1
            for twin in event.twins:
                for block_id in twin.block_ids:
                    if block_id >= 0:  # else a window has passed it
                        counts[block_id] += 1


class Levels:
    """The most urgent priority of those that ever held a cached block, as a level: a listener of the core's events.

    Whoever holds a block holds those above it, so the level of a block is at least that of a block below.
    """

    def __init__(self, num_blocks: int) -> None:
        self.levels = [0] * num_blocks
        self._of_request: dict[str, int] = {}

    def __call__(self, event: events.Event) -> None:
        levels = self.levels
        if isinstance(event, events.RequestAdded):
            self._of_request[event.request_id] = -event.priority
        elif isinstance(event, events.PrefixAttached):
            level = self._of_request.get(event.request_id, 0)
            for table in event.block_tables:
                for block_id in table:
                    if block_id >= 0:
                        levels[block_id] = max(levels[block_id], level)
        elif isinstance(event, events.BlocksCommitted):
            level = self._of_request.get(event.request_id, 0)
            for block in event.blocks:
                for block_id in block.block_ids:
                    if block_id >= 0:
                        levels[block_id] = level
            for twin in event.twins:
                for block_id in twin.block_ids:
                    if block_id >= 0:
                        levels[block_id] = max(levels[block_id], level)
        elif isinstance(event, events.RequestFinished):
            self._of_request.pop(event.output.request_id, None)


def policy_named(name: str, num_blocks: int) -> tuple[EvictionPolicy, events.Listener | None]:
    """A policy for a pool, and what must hear the events of its block manager. Raises ConfigError for one unknown."""
    if name == "lru":
        return LeastRecentlyUsed(), None
    if name == "lfu":
        uses = Uses(num_blocks)
        return Ranked(uses.counts.__getitem__), uses
    if name == "priority":
        levels = Levels(num_blocks)
        return Ranked(levels.levels.__getitem__), levels
    raise ConfigError(f"--policy is {name!r}; it must be one of {', '.join(POLICIES)}")
