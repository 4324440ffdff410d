"""What waits to be called on event loops, and when it leaves the engine's thread. It does not know what it carries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_Callback = tuple[Callable[..., None], tuple[object, ...]]


class Outbox:
    """Calls of one event loop leave together, by one callback, so that a step wakes a loop once at most.

    Where few requests are open (`FEW_REQUESTS`), all leaves with its step. With more, what can wait is held until
    `interval_s` has passed since the last time: then a reader gets the text of several steps at once, and the threads
    that send and read it take less of the processor from those that compute. With more than `MANY_REQUESTS` the
    interval is in proportion longer, up to `MOST_INTERVALS`, so that they send as often as those in all. What cannot
    wait takes all along.
    """

    FEW_REQUESTS, MANY_REQUESTS, MOST_INTERVALS = 4, 8, 10

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._waiting: dict[asyncio.AbstractEventLoop, list[_Callback]] = {}
        self._is_urgent = False
        self._left_s = 0.0

    def put(
        self, loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object, can_wait: bool
    ) -> None:
        self._waiting.setdefault(loop, []).append((function, arguments))
        self._is_urgent |= not can_wait

    def is_due(self, num_open: int, now: float) -> bool:
        if not self._waiting:
            return False
        if self._is_urgent or num_open <= self.FEW_REQUESTS:
            return True
        intervals = min(max(num_open / self.MANY_REQUESTS, 1.0), self.MOST_INTERVALS)
        return now - self._left_s >= intervals * self._interval_s

    def send(self, now: float) -> list[asyncio.AbstractEventLoop]:
        """Sends all that waits. Returns the event loops that are closed: nobody reads there any more."""
        waiting, self._waiting = self._waiting, {}
        self._is_urgent, self._left_s = False, now
        closed = []
        for loop, callbacks in waiting.items():
            try:
                loop.call_soon_threadsafe(_call_all, callbacks)
            except RuntimeError:
                closed.append(loop)
        return closed


def _call_all(callbacks: list[_Callback]) -> None:
    for function, arguments in callbacks:
        function(*arguments)
