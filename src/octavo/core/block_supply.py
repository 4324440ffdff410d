"""Blocks for those who need them: free ones, then idle cached ones, which leave the index. It knows no requests."""

from __future__ import annotations

from octavo.core import events
from octavo.core.block_pool import BlockPool
from octavo.core.radix_node import GONE
from octavo.core.radix_tree import RadixTree
from octavo.core.windows import Windows


class BlockSupply:
    """What is counted as available can be had."""

    __slots__ = ("_listeners", "_pool", "_tree", "_window_groups", "_windows", "num_evicted")

    def __init__(self, pool: BlockPool, tree: RadixTree, windows: Windows, listeners: list[events.Listener]) -> None:
        self._pool = pool
        self._tree = tree
        self._windows = windows
        self._window_groups = {group for group, _ in windows.behind}
        self._listeners = listeners
        self.num_evicted = 0  # blocks, so far

    def take(self, count: int) -> list[int]:
        """`count` of the available blocks, equally many for each KV group."""
        missing = count - self._pool.num_free
        if missing > 0:
            self.evict(missing)
        return self._pool.take(count)

    def evict(self, count: int) -> None:
        """Make at least `count` idle blocks free.

        A block of a window leaves alone. With another go those of its token block, of all groups: without it, nothing
        of them can be hit.
        """
        idle, freed = self._pool.idle, list[int]()
        told: list[tuple[int, ...]] | None = [] if self._listeners else None
        if self._windows:
            freed += self._take_out(idle.pop_passed(count), told)
        at_once = self._windows.num_groups == 1
        while len(freed) < count:
            chosen = idle.pop(count - len(freed) if at_once else 1)
            if self._pool.group_of(chosen[0]) in self._window_groups:
                freed += self._take_out(chosen, told)
                continue
            removed = self._tree.remove(chosen)
            block_ids = [block_id for node_blocks in removed for block_id in node_blocks if block_id != GONE]
            if not at_once:
                idle.remove([block_id for block_id in block_ids if block_id != chosen[0]])
            freed += block_ids
            if told is not None:
                told += removed
        self._pool.put_back(freed)
        self.num_evicted += len(freed)
        if told:
            event = events.BlocksEvicted(tuple(told))
            for listener in self._listeners:
                listener(event)

    def _take_out(self, block_ids: list[int], told: list[tuple[int, ...]] | None) -> list[int]:
        """Take blocks of windows out of the index."""
        group_of, take_out = self._pool.group_of, self._tree.take_out
        for block_id in block_ids:
            group = group_of(block_id)
            take_out(block_id, group)
            if told is not None:
                told.append(tuple([block_id if one == group else GONE for one in range(self._windows.num_groups)]))
        return block_ids
