"""Where an asyncio task receives deltas. It does not know the engine's thread; all of it runs on one event loop."""

from __future__ import annotations

import asyncio

from octavo.engine.outputs import GenerationDelta, merge_deltas


class Inbox:
    """Deltas of one or several requests, told apart by an index. One task takes, the event loop's callbacks put."""

    __slots__ = ("_deltas", "_waiter", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._deltas: list[tuple[int, GenerationDelta]] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, index: int, delta: GenerationDelta) -> None:
        self._deltas.append((index, delta))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[tuple[int, GenerationDelta]]:
        """All that has come since the last call, at least one. A reader that fell behind gets one delta per branch."""
        if not self._deltas:
            assert self._waiter is None, "two tasks take from one inbox"
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken, self._deltas = self._deltas, []
        if len(taken) == 1:
            return taken
        by_branch: dict[tuple[int, int], list[GenerationDelta]] = {}
        for index, delta in taken:
            by_branch.setdefault((index, delta.branch), []).append(delta)
        return [(index, merge_deltas(deltas)) for (index, _), deltas in by_branch.items()]
