"""Blocks for those who need them: free ones, then idle cached ones, which leave the index. It knows no requests."""

from __future__ import annotations

from octavo.core import events
from octavo.core.block_pool import BlockPool
from octavo.core.radix_node import GONE
from octavo.core.radix_tree import RadixTree
from octavo.core.windows import Windows


class BlockSupply:
    """What is counted as available can be had."""

    __slots__ = ("_listeners", "_pool", "_tree", "_windows", "num_evicted")

    def __init__(self, pool: BlockPool, tree: RadixTree, windows: Windows, listeners: list[events.Listener]) -> None:
        self._pool = pool
        self._tree = tree
        self._windows = windows
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
        pool, at_once = self._pool, self._windows.num_groups == 1
        groups = dict(self._windows.behind)
        while count > 0:
            chosen = pool.idle.pop(count if at_once else 1)
            group = pool.group_of(chosen[0])
            if group in groups:
                for block_id in chosen:
                    self._tree.take_out(block_id, group)
                removed = [
                    tuple([block_id if one == group else GONE for one in range(self._windows.num_groups)])
                    for block_id in chosen
                ]
                block_ids = chosen
            else:
                removed = self._tree.remove(chosen)
                block_ids = [block_id for node_blocks in removed for block_id in node_blocks if block_id != GONE]
                if not at_once:
                    pool.idle.remove(block_id for block_id in block_ids if block_id != chosen[0])
            pool.put_back(block_ids)
            self.num_evicted += len(block_ids)
            count -= len(block_ids)
            for listener in self._listeners:
                listener(events.BlocksEvicted(tuple(removed)))
