"""An executor that computes nothing: it says how long a step would take, and draws the tokens that it was told.

It implements `core.step.Executor`; time is virtual, and moves only here and in `VirtualClock.wait_until`. It does not
look at blocks: what they hold is not its business.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.step import SampledToken, SampleSpec, StepPlan, StepResult, TokenLogprob
from octavo.replay.cost_model import CostModel, StepWork

FIRST_INVENTED_TOKEN = 0xC0000000  # above the ids of every model; each request has one of its own


@dataclass(slots=True)
class VirtualClock:
    """Owned by the replay; the executor advances it."""

    now_s: float = 0.0

    def wait_until(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)


class SimExecutor:
    """Draws, for each request, the answer that it was told (`tell`), then a token that nobody else has.

    With `drawn` it knows what requests drew while they coasted.
    """

    def __init__(self, cost: CostModel, clock: VirtualClock) -> None:
        self._cost = cost
        self._clock = clock
        self._answers: dict[str, array[int]] = {}
        self._invented: dict[str, SampledToken] = {}
        self._num_invented = 0
        self.num_steps = 0
        self.num_tokens = 0
        self.num_coasting = 0  # rows of the last step that the plan did not write out

    def tell(self, request_id: str, answer: array[int] | None) -> None:
        """What a request will answer, where the trace has it."""
        if answer:
            self._answers[request_id] = answer

    def forget(self, request_id: str) -> None:
        self._answers.pop(request_id, None)
        self._invented.pop(request_id, None)

    def execute(self, plan: StepPlan) -> StepResult:
        tokens = sampled = read = pairs = 0
        drawn: dict[str, SampledToken] = {}
        candidates: dict[str, tuple[TokenLogprob, ...]] = {}
        for row in plan.rows:
            start, count = row.start, len(row.token_ids)
            tokens += count
            read += start + count
            pairs += count * start + count * (count + 1) // 2
            specs = [] if row.sample is None else [(row.request_id, row.sample)]
            if row.branch_samples:
                specs += [(branch.request_id, branch.sample) for branch in row.branch_samples]
            for name, spec in specs:
                if spec.num_candidates:
                    candidates[name] = _some_candidates(spec)
                else:
                    drawn[name] = self._draw(name, spec)
            sampled += bool(specs)
        self.num_coasting = plan.coasting.num_rows
        tokens, sampled = tokens + self.num_coasting, sampled + self.num_coasting
        read, pairs = read + plan.coasting.read_tokens, pairs + plan.coasting.read_tokens
        self.num_steps += 1
        self.num_tokens += tokens
        self._clock.now_s += self._cost.step_s(StepWork(tokens, sampled, read, pairs))
        return StepResult(drawn, num_tokens=tokens, candidates=candidates)

    def drawn(self, name: str, position: int, count: int) -> Sequence[int]:
        """The tokens that a request, which has drawn some before, draws in so many steps."""
        answer = self._answers.get(name)
        known = answer[position : position + count].tolist() if answer is not None else []
        return [*known, *[self._invented[name].token_id] * (count - len(known))]

    def _draw(self, name: str, spec: SampleSpec) -> SampledToken:
        invented = self._invented.get(name)
        if invented is None:
            invented = SampledToken(FIRST_INVENTED_TOKEN + self._num_invented % 0x30000000)
            self._num_invented += 1
            self._invented[name] = invented
        answer = self._answers.get(name)
        if answer is not None and spec.position < len(answer):
            return SampledToken(answer[spec.position])
        return invented


def _some_candidates(spec: SampleSpec) -> tuple[TokenLogprob, ...]:
    """Of a beam search: likely tokens that fall off evenly. Which beams go on then depends on nothing real."""
    return tuple(TokenLogprob(FIRST_INVENTED_TOKEN + at, -0.7 - 0.5 * at) for at in range(spec.num_candidates))
