"""The queue gives requests in order and keeps nothing of those that ended while they waited (F24)."""

from __future__ import annotations

import gc
import random
import weakref

from octavo.core.request import Request, RequestStatus
from octavo.core.sampling_params import SamplingParams
from octavo.core.waiting_queue import WaitingQueue


class Waiting(Request):
    """A request that can be seen to go."""

    __slots__ = ("__weakref__",)


def waiting(number: int) -> Waiting:
    request = Waiting(f"r{number}", [1], SamplingParams(), seed=0)
    request.order = (number, number, 0)
    return request


def test_requests_come_out_in_order_whoever_ends_meanwhile() -> None:
    rng, queue = random.Random(0), WaitingQueue()
    alive = {number: waiting(number) for number in range(200)}
    for number in rng.sample(range(200), 200):
        queue.push(alive[number])
    for number in rng.sample(range(200), 120):
        alive[number].status = RequestStatus.FINISHED
        queue.forget(alive.pop(number))
        assert len(queue) == len(alive)
    found = []
    while (request := queue.first()) is not None:
        assert queue.first() is request, "it stays until it is taken"
        queue.pop()
        found.append(request)
    assert found == [alive[number] for number in sorted(alive)]
    assert len(queue) == 0


def test_behind_a_head_that_never_starts_the_ended_do_not_pile_up() -> None:
    queue, seen = WaitingQueue(), []
    head = waiting(0)
    queue.push(head)
    for number in range(1, 1000):
        request = waiting(number)
        seen.append(weakref.ref(request))
        queue.push(request)
        request.status = RequestStatus.FINISHED
        queue.forget(request)
        del request
    gc.collect()
    assert len(queue) == 1
    assert queue.first() is head
    assert sum(one() is not None for one in seen) <= 2
