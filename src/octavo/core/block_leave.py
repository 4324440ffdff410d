"""Blocks that a request gives up while it goes on: those behind its windows, and those of tokens that it drops."""

from __future__ import annotations

from octavo.core import block_events, events
from octavo.core.block_pool import BlockPool
from octavo.core.request import Request
from octavo.core.streaming import DropPlan
from octavo.core.windows import Windows


class BlockLeave:
    """Works on the pool and the listeners of one block manager."""

    __slots__ = ("_block_size", "_listeners", "_pool", "_windows", "num_dropped_tokens", "num_passed")

    def __init__(self, block_size: int, pool: BlockPool, windows: Windows, listeners: list[events.Listener]) -> None:
        self._block_size = block_size
        self._pool = pool
        self._windows = windows
        self._listeners = listeners
        self.num_passed = 0  # blocks that windows have passed, so far
        self.num_dropped_tokens = 0  # so far; what is computed again may be dropped again

    def pass_windows(self, request: Request, *, is_cached: bool) -> None:
        """Give up the blocks that the windows have passed.

        They are the first to be evicted, but for those that another text needs which begins like this one: where it
        parted from others before, and at the end of the prompt, where another answer starts.
        """
        passed = self._windows.take_passed(request)
        size, shared, num_prompt = self._block_size, request.num_shared_blocks, request.num_prompt_tokens
        # First and last full block at which such a text attaches: the same prompt again leaves its last token out.
        edges = ((shared, shared), ((num_prompt - 1) // size, num_prompt // size))
        for group, first, block_ids in passed:
            self.num_passed += len(block_ids)
            if not is_cached:
                self._pool.release_private(block_ids)
                continue
            behind = dict(self._windows.behind)[group]
            kept = {i - first for low, high in edges for i in range(max(first, low - behind), high)}
            useful = [block_id for i, block_id in enumerate(block_ids) if i in kept]
            self._pool.release_cached(useful)
            self._pool.release_passed([block_id for i, block_id in enumerate(block_ids) if i not in kept])
        if passed and self._listeners:
            event = block_events.passed(request, passed)
            for listener in self._listeners:
                listener(event)

    def drop_tokens(self, request: Request) -> None:
        """Give up the tokens that are not to be kept from here on; later ones move ahead by whole blocks."""
        drops = request.drops
        assert isinstance(drops, DropPlan)
        size = self._block_size
        count = (drops.num_dropped(request.num_computed_tokens) - request.num_dropped_tokens) // size
        if not count:
            return
        first = drops.num_sinks // size
        dropped = [table[first : first + count] for table in request.block_tables]
        for table, block_ids in zip(request.block_tables, dropped, strict=True):
            del table[first : first + count]
            self._pool.release_private(block_ids)
        request.num_dropped_tokens += count * size
        self.num_dropped_tokens += count * size
        for listener in self._listeners:
            listener(events.BlocksDropped(request.request_id, first, block_events.frozen(dropped)))
