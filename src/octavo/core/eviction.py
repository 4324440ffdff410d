"""Which idle cached block goes first when memory is wanted. It knows block ids and their order, no tokens, no tree."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """Holds the idle cached blocks: those that are indexed and that nobody holds.

    What it must keep: a block comes out of `pop` only after every idle block that stands below it in the tree.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """All of them, in the order in which they would go."""
        ...

    def add(self, block_ids: Sequence[int]) -> None:
        """These became idle just now; children stand before their parents."""
        ...

    def remove(self, block_ids: Iterable[int]) -> None:
        """These are held again, or gone."""
        ...

    def pop(self, count: int) -> list[int]:
        """Take out the `count` blocks to go first."""
        ...


class LeastRecentlyUsed:
    """The block whose last holder let go longest ago. Every operation is O(1) a block.

    Invariant: of an idle node and its parent, the node stands first. So the front is always a leaf, and plain release
    order is leaf-first: whoever holds a node holds all nodes above it (a commit swaps twins, so a table is always a
    path of the tree); hence a parent becomes idle with the last holder of its children, or later; and a release hands
    over the blocks of a table from its tail to its head. A block that is held and released again only moves back, and
    it takes the path above it along.
    """

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def add(self, block_ids: Sequence[int]) -> None:
        self._order.update(dict.fromkeys(block_ids))

    def remove(self, block_ids: Iterable[int]) -> None:
        order = self._order
        for block_id in block_ids:
            del order[block_id]

    def pop(self, count: int) -> list[int]:
        popitem = self._order.popitem
        return [popitem(last=False)[0] for _ in range(count)]
