"""Steps of a live engine, or of a recording, with the time that each took: what a cost model is fitted from.

It is told by the core (`Journal`) and keeps numbers only.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.engine_core import EngineCore
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import StepPlan, StepResult
from octavo.replay.cost_fit import MeasuredStep
from octavo.replay.cost_model import work_of


def work_of_plan(plan: StepPlan) -> MeasuredStep:
    """The step's work; its time is 0 until it is known."""
    rows = ((row.start, len(row.token_ids), row.sample is not None or bool(row.branch_samples)) for row in plan.rows)
    return MeasuredStep(work_of(rows), 0.0)


class StepProbe:
    """A journal that times each step: from its plan to its result."""

    def __init__(self, core: EngineCore, clock: Callable[[], float]) -> None:
        self.steps: list[MeasuredStep] = []
        self._clock = clock
        self._start_s = 0.0
        core.keep_journal(self)

    def added(self, request: Request) -> None: ...

    def ending(self, request_id: str, finish_reason: str, branch: int | None) -> None: ...

    def planned(self, plan: StepPlan) -> None:  # noqa: ARG002
        self._start_s = self._clock()

    def executed(self, plan: StepPlan, result: StepResult) -> None:  # noqa: ARG002
        seconds = self._clock() - self._start_s
        if seconds > 0:
            self.steps.append(MeasuredStep(work_of_plan(plan).work, seconds))

    def failing(self, error: str) -> None: ...

    def resetting(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Round:
    """Requests that run together."""

    requests: int
    prompt: int
    output: int


ROUNDS = (
    Round(1, 8, 12),
    Round(1, 200, 12),
    Round(2, 40, 12),
    Round(4, 100, 12),
    Round(8, 16, 12),
    Round(8, 250, 12),
    Round(16, 30, 10),
    Round(24, 60, 8),
    Round(1, 900, 12),
    Round(3, 500, 12),
)


def run_rounds(core: EngineCore, *, max_model_len: int, vocab_size: int, until: Callable[[], bool]) -> int:
    """Prompts of random tokens, which hit nothing, again and again until `until` says so; how many rounds that were."""
    chance, done = random.Random(0), 0
    while not until() or done < len(ROUNDS):
        one = ROUNDS[done % len(ROUNDS)]
        prompt = max(1, min(one.prompt, max_model_len - one.output))
        for number in range(one.requests):
            ids = [chance.randrange(vocab_size) for _ in range(prompt)]
            params = SamplingParams(max_tokens=min(one.output, max_model_len - 1), ignore_eos=True, temperature=0.0)
            core.add(Request(f"calibrate-{done}-{number}", ids, params, seed=number))
        while core.has_work:
            core.step()
        done += 1
        if done >= len(ROUNDS) and until():
            break
    return done
