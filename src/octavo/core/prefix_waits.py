"""Who computes which prefix now, and who waits for it instead of computing it twice. It knows no memory and no budget.

A running request stands at one place: the node of its last committed block, and the tokens of the block that it will
commit next. A request whose match ends at that node and goes on with those tokens can wait. The place moves when the
request commits, so keeping it costs O(1) a step; who waits costs nothing until its wait is over.

Invariant: a request waits only for a running one that comes before it in order. Hence waits have no cycle; and as only
finitely many requests ever come before another (see scheduler.py) and each of them ends or is preempted in finite
time, every wait ends.
"""

from __future__ import annotations

from octavo.core.radix_node import Node
from octavo.core.radix_tree import common_tokens
from octavo.core.request import Request

Place = tuple[Node | str, bytes]  # the node, or the namespace for its root, and the tokens of the next block


class PrefixWaits:
    """All methods take requests of one scheduler."""

    __slots__ = ("_block_size", "_computing", "_place", "_waiting", "_waits_for")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._computing: dict[Place, Request] = {}
        self._place: dict[str, Place] = {}  # request id -> its entry in _computing
        # Computing request's id -> those that wait for it, with the committed blocks that each waits for.
        self._waiting: dict[str, list[tuple[int, Request]]] = {}
        self._waits_for: dict[str, str] = {}  # waiting request's id -> the id of the one that computes

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._waits_for)

    def advance(self, request: Request) -> list[Request]:
        """A running request starts, or has committed. Returns those that need not wait for it any more."""
        self._leave(request)
        start = request.num_committed_blocks * self._block_size
        if start + self._block_size <= request.num_sharable_tokens:  # what is yet to be sampled nobody awaits
            tokens = request.token_ids[start : start + self._block_size].tobytes()
            place: Place = (request.node or request.namespace, tokens)
            if place not in self._computing:
                self._computing[place] = request
                self._place[request.request_id] = place
        waiting = self._waiting.get(request.request_id)
        return self._release(request, request.num_committed_blocks) if waiting else []

    def retire(self, request: Request) -> list[Request]:
        """A running request was preempted or has ended. Returns those that waited for it."""
        self._leave(request)
        return self._release(request, None)

    def cancel(self, request: Request) -> bool:
        """A request ends while it may be waiting here. Returns whether it was."""
        computing_id = self._waits_for.pop(request.request_id, None)
        if computing_id is None:
            return False
        left = [entry for entry in self._waiting.pop(computing_id) if entry[1] is not request]
        if left:
            self._waiting[computing_id] = left
        return True

    def wait(self, request: Request, nodes: list[Node]) -> tuple[str, int] | None:
        """Let a request whose match is `nodes` wait, if another is computing at least one more whole block of it.

        Returns who computes, and the number of blocks to wait for; None if there is nothing to wait for.
        """
        size, matched = self._block_size, len(nodes)
        usable = request.max_hit_tokens // size
        if matched >= usable:
            return None
        next_block = request.token_ids[matched * size : (matched + 1) * size].tobytes()
        computing = self._computing.get((nodes[-1] if nodes else request.namespace, next_block))
        if computing is None or computing.order > request.order:
            return None
        shared = common_tokens(computing.token_ids.tobytes(), request.token_ids.tobytes())
        num_blocks = min(min(shared, computing.num_sharable_tokens) // size, usable)
        self._waiting.setdefault(computing.request_id, []).append((num_blocks, request))
        self._waits_for[request.request_id] = computing.request_id
        computing.num_shared_blocks = max(computing.num_shared_blocks, num_blocks)  # there its windows are wanted
        return computing.request_id, num_blocks

    def _release(self, request: Request, committed: int | None) -> list[Request]:
        """End the waits for `request` up to so many blocks (None: all of them)."""
        waiting = self._waiting.pop(request.request_id, [])
        over = [entry[1] for entry in waiting if committed is None or entry[0] <= committed]
        if len(over) < len(waiting):
            self._waiting[request.request_id] = [entry for entry in waiting if entry[0] > (committed or 0)]
        for waiter in over:
            del self._waits_for[waiter.request_id]
        return over

    def _leave(self, request: Request) -> None:
        place = self._place.pop(request.request_id, None)
        if place is not None:
            del self._computing[place]
