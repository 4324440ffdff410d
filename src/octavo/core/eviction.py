"""Which idle cached block goes first when memory is wanted. It knows block ids and their order, no tokens, no tree."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol


class EvictionPolicy(Protocol):
    """Holds the idle cached blocks: those that are indexed and that nobody holds.

    What it must keep: a block comes out of `pop` only after every idle block that stands below it in the tree; but for
    blocks of groups with a window, which may go in any order.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """All of them, in the order in which they would go."""
        ...

    def add(self, block_ids: Sequence[int]) -> None:
        """These became idle just now; children stand before their parents."""
        ...

    def add_passed(self, block_ids: Sequence[int]) -> None:
        """A window has passed these, of requests that go on: they are the least likely to be of use."""
        ...

    def remove(self, block_ids: Iterable[int]) -> None:
        """These are held again, or gone."""
        ...

    def pop_passed(self, count: int) -> list[int]:
        """Take out at most `count` of those that a window has passed."""
        ...

    def pop(self, count: int) -> list[int]:
        """Take out the `count` blocks to go first, none of which a window has passed."""
        ...


class LeastRecentlyUsed:
    """First what windows have passed, then the block whose last holder let go longest ago. O(1) a block.

    Invariant: of an idle node and its parent, the node stands first. So the front is always a leaf, and plain release
    order is leaf-first: whoever holds a node holds all nodes above it (a commit swaps twins, so a table is always a
    path of the tree); hence a parent becomes idle with the last holder of its children, or later; and a release hands
    over the blocks of a table from its tail to its head. A block that is held and released again only moves back, and
    it takes the path above it along.
    """

    __slots__ = ("_order", "_passed")

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        self._passed: OrderedDict[int, None] = OrderedDict()  # blocks of windows only

    def __len__(self) -> int:
        return len(self._order) + len(self._passed)

    def __iter__(self) -> Iterator[int]:
        return chain(self._passed, self._order)

    def add(self, block_ids: Sequence[int]) -> None:
        self._order.update(dict.fromkeys(block_ids))

    def add_passed(self, block_ids: Sequence[int]) -> None:
        self._passed.update(dict.fromkeys(block_ids))

    def remove(self, block_ids: Iterable[int]) -> None:
        order, passed = self._order, self._passed
        for block_id in block_ids:
            if passed and block_id in passed:
                del passed[block_id]
            else:
                del order[block_id]

    def pop_passed(self, count: int) -> list[int]:
        popitem = self._passed.popitem
        return [popitem(last=False)[0] for _ in range(min(count, len(self._passed)))]

    def pop(self, count: int) -> list[int]:
        popitem = self._order.popitem
        return [popitem(last=False)[0] for _ in range(count)]
