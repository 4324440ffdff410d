"""Who of the waiting may start. It owns the queue and the waits for a prefix; it starts nobody itself.

Only the head of the queue is looked at: nobody is admitted past it, except while it waits for a prefix that is being
computed, and then it is not in the queue. Of a request with several branches the first open one stands here for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.core import events
from octavo.core.block_manager import BlockManager
from octavo.core.branches import Branches
from octavo.core.prefix_match import PrefixMatch
from octavo.core.prefix_waits import PrefixWaits
from octavo.core.request import Request
from octavo.core.room import Room
from octavo.core.waiting_queue import WaitingQueue

LOOKS_AT_ONCE = 64  # requests that a look at the queue may send to wait for a prefix; the next step goes on


class Admission:
    """Invariant: a waiting request is either in the queue or waits for a prefix."""

    __slots__ = ("_blocked", "_blocks", "_queue", "_room", "_waits")

    def __init__(self, blocks: BlockManager, room: Room) -> None:
        self._blocks = blocks
        self._room = room
        self._queue = WaitingQueue()
        self._waits = PrefixWaits(blocks.block_size)
        # The head that found no room (its order), and the available blocks and running requests of that time: no second
        # look before there are more of the ones or fewer of the others.
        self._blocked: tuple[tuple[int, int, int], int, int] | None = None

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._queue) + len(self._waits)

    def enter(self, request: Request) -> None:
        self._queue.push(request)

    def leave(self, request: Request) -> None:
        """A waiting request has just become FINISHED."""
        if not self._waits.cancel(request):
            self._queue.forget(request)

    def advanced(self, request: Request) -> None:
        """A running request has started, or has committed blocks."""
        if self._blocks.enable_prefix_caching:
            for waiter in self._waits.advance(request):
                self._queue.push(waiter)

    def stopped(self, request: Request) -> None:
        """A running request was preempted, or has ended."""
        for waiter in self._waits.retire(request):
            self._queue.push(waiter)

    def next(
        self, running: Sequence[Request], groups: Iterable[Branches], num_seats: int
    ) -> tuple[Request, PrefixMatch] | None:
        """Take the head out of the queue if it can start, with what the cache has of it.

        It starts beside `running`, among which are those of `groups`, and takes at most `num_seats`.
        """
        for _ in range(LOOKS_AT_ONCE):
            request = self._queue.first()
            if request is None or self._is_blocked(request, running):
                return None
            if (1 if request.group is None else request.group.num_seats) > num_seats:
                return None
            match = self._blocks.find_prefix(request)
            if self._must_wait(request, match):
                self._queue.pop()
                continue
            if not self._room.is_there(request, match, running, groups):
                self._blocked = (request.order, self._blocks.pool.num_available, len(running))
                return None
            self._queue.pop()
            return request, match
        return None

    def _is_blocked(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether it found no room before, and nothing has been given back since. Alone it always has room."""
        if self._blocked is None or self._blocked[0] != request.order or not running:
            return False
        return self._blocks.pool.num_available <= self._blocked[1] and len(running) >= self._blocked[2]

    def _must_wait(self, request: Request, match: PrefixMatch) -> bool:
        if not self._blocks.enable_prefix_caching:
            return False
        found = self._waits.wait(request, match.nodes)
        if found is not None and self._blocks.listeners:
            self._blocks.tell(events.RequestWaits(request.request_id, *found))
        return found is not None
