"""The paced executor on a clock that is moved by hand: steps end when the cost model says, whatever the core takes."""

from __future__ import annotations

from array import array

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import PromptScores, Row, SampleSpec, StepPlan
from octavo.replay.cost_model import CostModel
from octavo.replay.sim_serving import PacedExecutor

TEN_MS = CostModel("ten milliseconds", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.010)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def plan(position: int = 0, **sample: object) -> StepPlan:
    spec = SampleSpec(SamplingParams(**sample), 7, position)  # type: ignore[arg-type]
    return StepPlan(1, (), (Row("r", 0, (1, 2, 3), (array("i", [0]),), spec),))


def test_a_step_takes_what_the_model_says_with_what_the_core_took() -> None:
    clock = Clock()
    executor = PacedExecutor(TEN_MS, [65, 66, 67], clock, clock.sleep)
    executor.execute(plan())
    assert clock.now == pytest.approx(100.010)
    clock.now += 0.002  # the scheduler, between two steps
    executor.execute(plan(1))
    assert clock.now == pytest.approx(100.020)
    clock.now += 5.0  # nothing to do
    executor.execute(plan(2))
    assert clock.now == pytest.approx(105.030)
    assert clock.slept == pytest.approx([0.010, 0.008, 0.010])


def test_what_is_drawn_depends_on_seed_and_position_alone() -> None:
    clock = Clock()
    one, other = (PacedExecutor(TEN_MS, [65, 66, 67], clock, clock.sleep) for _ in range(2))
    drawn = [one.execute(plan(at)).sampled["r"].token_id for at in range(20)]
    assert drawn == [other.execute(plan(at)).sampled["r"].token_id for at in range(20)]
    assert set(drawn) == {65, 66, 67}


def test_log_probabilities_and_scores_have_the_number_that_was_asked_for() -> None:
    clock = Clock()
    executor = PacedExecutor(TEN_MS, range(65, 91), clock, clock.sleep)
    token = executor.execute(plan(logprobs=4)).sampled["r"]
    assert len({one.token_id for one in token.top_logprobs}) == 4
    assert token.top_logprobs[0].token_id == token.token_id
    scores = PromptScores(0, (5, 6), 0)
    row = Row("r", 0, (4, 5, 6), (array("i", [0]),), None, (), scores)
    assert [one.token_id for one in executor.execute(StepPlan(1, (), (row,))).prompt_scores["r"]] == [5, 6]
