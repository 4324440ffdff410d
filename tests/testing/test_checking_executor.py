"""The checking executor notices what it is there to notice."""

from __future__ import annotations

from array import array

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import BlockCopy, Row, SampleSpec, StepPlan
from octavo.testing.checking_executor import CheckingExecutor
from octavo.testing.fake_clock import FakeClock

SPEC = SampleSpec(SamplingParams(), 0, 0)


def row(request_id: str, start: int, tokens: list[int], table: list[int], spec: SampleSpec | None = None) -> Row:
    return Row(request_id, start, tuple(tokens), (array("i", table),), spec)


def plan(*rows: Row, copies: tuple[BlockCopy, ...] = (), preempted: tuple[str, ...] = ()) -> StepPlan:
    return StepPlan(1, copies, rows, preempted)


@pytest.fixture
def executor() -> CheckingExecutor:
    """Block 0 and 1 hold the text 5 6 7 8 9."""
    executor = CheckingExecutor(4, vocab_size=10)
    executor.execute(plan(row("writer", 0, [5, 6, 7, 8, 9], [0, 1])))
    return executor


WRONG = {
    "nothing was written": plan(row("r", 6, [1], [0, 1])),
    "position 0 stands at 4": plan(row("r", 5, [1], [0, 2]), copies=(BlockCopy(0, 2, 3),)),
    "belongs to another text": plan(row("r", 5, [1], [2, 1])),
    "both write block 3": plan(row("a", 0, [1], [3]), row("b", 0, [1], [3])),
    "writes block 0 that r holds": plan(row("r", 5, [1], [0, 1]), row("b", 0, [1], [0])),
    "a block stands twice": plan(row("r", 0, [1] * 8, [3, 3])),
    "position 4 has no block": plan(row("r", 4, [1], [0])),
    "at least one token": plan(row("r", 4, [], [0, 1])),
    "two rows in one step": plan(row("r", 0, [1], [3]), row("r", 1, [1], [3])),
    "a preempted request has a row": plan(row("r", 0, [1], [3]), preempted=("r",)),
    "copied with a hole": plan(row("r", 0, [1], [3]), copies=(BlockCopy(1, 4, 2),)),
    "copied to itself": plan(row("r", 0, [1], [3]), copies=(BlockCopy(1, 1, 1),)),
    "block tables": StepPlan(1, (), (Row("r", 0, (1,), (array("i", [3]), array("i", [4])), None),)),
}


@pytest.mark.parametrize("message", WRONG)
def test_it_notices(executor: CheckingExecutor, message: str) -> None:
    if message == "belongs to another text":
        executor.execute(plan(row("second writer", 0, [5, 6, 7, 7], [2])))
    with pytest.raises(AssertionError, match=message):
        executor.execute(WRONG[message])


def test_it_knows_whose_text_it_reads(executor: CheckingExecutor) -> None:
    """A whole text of somebody else is noticed if the request's own is known."""
    executor.expect("r", [5, 6, 7, 1, 9, 2])
    with pytest.raises(AssertionError, match="a foreign token stands at position 3"):
        executor.execute(plan(row("r", 5, [2], [0, 1])))
    executor.expect("r", [5, 6, 7, 8, 9, 2])
    with pytest.raises(AssertionError, match="runs a foreign token at position 5"):
        executor.execute(plan(row("r", 5, [3], [0, 1])))
    with pytest.raises(AssertionError, match="samples after 5 of 6 tokens"):
        executor.execute(plan(row("r", 4, [9], [0, 1], SPEC)))
    result = executor.execute(plan(row("r", 5, [2], [0, 1], SPEC)))
    token = result.sampled["r"].token_id
    executor.execute(plan(row("r", 6, [token], [0, 1])))


def test_copies_run_in_order_before_rows(executor: CheckingExecutor) -> None:
    executor.execute(
        plan(
            row("one", 3, [1], [2]),
            row("two", 1, [6], [0]),
            copies=(BlockCopy(0, 2, 3), BlockCopy(0, 3, 1), BlockCopy(3, 0, 1)),
        )
    )
    assert executor.num_copies == 3
    with pytest.raises(AssertionError, match="nothing was written at position 2"):
        executor.execute(plan(row("two", 3, [1], [0])))


def test_a_failed_row_samples_nothing(executor: CheckingExecutor) -> None:
    executor.fail_next["r"] = "why"
    result = executor.execute(plan(row("r", 0, [1], [3], SPEC), row("s", 0, [1], [4], SPEC)))
    assert (result.failed, set(result.sampled), result.num_tokens) == ({"r": "why"}, {"s"}, 2)


def test_the_clock_moves_when_told() -> None:
    clock = FakeClock(5.0)
    assert clock.now() == 5.0
    clock.advance(1.5)
    assert clock.now() == 6.5
    with pytest.raises(AssertionError, match="cannot go back"):
        clock.advance(-1)
