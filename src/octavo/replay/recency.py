"""Things in the order in which they were last put on top, with their depth: O(log n) a call. No cache, no blocks."""

from __future__ import annotations

from collections.abc import Hashable


class RecencyOrder:
    """At most `capacity` things; the one that has been down longest goes when there are more.

    Places are numbers that grow; a Fenwick tree counts the taken ones (Fenwick, "A new data structure for cumulative
    frequency tables", Software: Practice and Experience 24, 1994). When places run out, all are numbered anew.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._size = 2 * capacity + 2
        self._tree = [0] * (self._size + 1)
        # Invariant: in the order of their places, the lowest first.
        self._place: dict[Hashable, int] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._place)

    def depth(self, key: Hashable) -> int | None:
        """How many stand above it; None if it is not here."""
        place = self._place.get(key)
        if place is None:
            return None
        below, tree = 0, self._tree
        while place:
            below += tree[place]
            place &= place - 1
        return len(self._place) - below

    def put(self, key: Hashable) -> None:
        """On top of all others."""
        self.remove(key)
        if len(self._place) >= self.capacity:
            self.remove(next(iter(self._place)))
        if self._next > self._size:
            self._renumber()
        self._place[key] = self._next
        self._add(self._next, 1)
        self._next += 1

    def remove(self, key: Hashable) -> None:
        place = self._place.pop(key, None)
        if place is not None:
            self._add(place, -1)

    def _add(self, place: int, change: int) -> None:
        tree, size = self._tree, self._size
        while place <= size:
            tree[place] += change
            place += place & -place

    def _renumber(self) -> None:
        keys = list(self._place)
        self._tree = [0] * (self._size + 1)
        self._place = {}
        for number, key in enumerate(keys, 1):
            self._place[key] = number
            self._add(number, 1)
        self._next = len(keys) + 1
