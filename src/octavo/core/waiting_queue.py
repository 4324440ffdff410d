"""Requests that wait for their turn, in order. It knows no blocks and no reasons."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from octavo.core.request import Request, RequestStatus


class WaitingQueue:
    """A heap by `Request.order`. Who ends while waiting stays as a dead entry until half of the entries are."""

    __slots__ = ("_heap", "_num_dead")

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Request]] = []
        # Invariant: an entry is dead exactly if its request is FINISHED; so many are.
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_dead

    def push(self, request: Request) -> None:
        heappush(self._heap, (request.order, request))

    def first(self) -> Request | None:
        """The one whose turn it is; it stays in the queue."""
        heap = self._heap
        while heap and heap[0][1].status is RequestStatus.FINISHED:
            heappop(heap)
            self._num_dead -= 1
        return heap[0][1] if heap else None

    def pop(self) -> None:
        """Take out the one that `first` just gave."""
        heappop(self._heap)

    def forget(self, request: Request) -> None:
        """One of the waiting has just become FINISHED."""
        assert request.status is RequestStatus.FINISHED, f"{request.request_id} leaves the queue while it waits"
        self._num_dead += 1
        if self._num_dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].status is not RequestStatus.FINISHED]
            heapify(self._heap)
            self._num_dead = 0
