"""Who waits for whom, and until when, without a scheduler around it."""

from __future__ import annotations

from octavo.core.prefix_waits import PrefixWaits
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams

TEXT = list(range(40))


def request_of(number: int, tokens: list[int]) -> Request:
    request = Request(f"r{number}", tokens, SamplingParams(), seed=0)
    request.order = (number, number, 0)
    return request


def test_each_waits_for_its_own_part() -> None:
    """Two share 8 and 40 tokens with the one who computes, in blocks of 4: each is let go in its own time, once."""
    waits = PrefixWaits(4)
    slow = request_of(0, [*TEXT, 0, 0])
    soon, late = request_of(1, [*TEXT[:8], 99, 99]), request_of(2, [*TEXT, 99])
    assert waits.advance(slow) == []
    assert waits.wait(soon, []) == ("r0", 2)
    assert waits.wait(late, []) == ("r0", 10)
    released = []
    for num_blocks in range(1, 11):
        slow.num_committed_blocks = num_blocks
        released += [(num_blocks, waiter) for waiter in waits.advance(slow)]
        assert len(waits) == 2 - len(released)
    assert released == [(2, soon), (10, late)]
    assert waits.retire(slow) == []


def test_all_are_let_go_when_the_one_who_computes_stops() -> None:
    waits = PrefixWaits(4)
    slow = request_of(0, TEXT)
    waiters = [request_of(n, [*TEXT, n]) for n in range(1, 5)]
    waits.advance(slow)
    for waiter in waiters:
        assert waits.wait(waiter, []) == ("r0", 10)
    assert waits.cancel(waiters[2])
    assert not waits.cancel(waiters[2])
    assert waits.retire(slow) == [waiters[0], waiters[1], waiters[3]]
    assert len(waits) == 0
    assert waits.wait(waiters[0], []) is None, "nobody computes it now"


def test_nothing_is_kept_of_those_who_ended() -> None:
    waits = PrefixWaits(4)
    for number in range(0, 40, 2):
        slow, waiter = request_of(number, [*TEXT, number]), request_of(number + 1, [*TEXT, number, 0])
        waits.advance(slow)
        waits.wait(waiter, [])
        waits.cancel(waiter)
        waits.retire(slow)
    kept = [waits._computing, waits._place, waits._waiting, waits._waits_for]
    assert not any(kept)
