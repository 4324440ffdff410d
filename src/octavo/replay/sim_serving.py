"""An executor for a live engine that takes as long as another machine would, and draws letters: nothing is computed.

Time is real here, slept away; what the scheduler and the server take themselves counts as part of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.core.step import Row, SampledToken, SampleSpec, StepPlan, StepResult, TokenLogprob
from octavo.replay.cost_model import CostModel, work_of

_SAME_RUN_S = 0.005  # a step that begins so soon after the one before follows it without a pause


class PacedExecutor:
    """Implements Executor. Which token is drawn is a function of the request's seed and the position alone."""

    def __init__(
        self,
        cost: CostModel,
        drawn_ids: Sequence[int],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        """drawn_ids: the tokens that answers are made of."""
        self._cost = cost
        self._drawn_ids = tuple(drawn_ids)
        self._clock = clock
        self._sleep = sleep
        self._due_s = 0.0  # when the last step was over

    def execute(self, plan: StepPlan) -> StepResult:
        now = self._clock()
        begin = self._due_s if now - self._due_s < _SAME_RUN_S else now
        rows = ((row.start, len(row.token_ids), _draws(row)) for row in plan.rows)
        self._due_s = begin + self._cost.step_s(work_of(rows))
        result = StepResult({}, num_tokens=plan.num_tokens)
        for row in plan.rows:
            if row.prompt_scores is not None:
                targets = row.prompt_scores.targets
                result.prompt_scores[row.request_id] = tuple(SampledToken(token, -1.0) for token in targets)
            specs = [] if row.sample is None else [(row.request_id, row.sample)]
            for name, spec in [*specs, *((branch.request_id, branch.sample) for branch in row.branch_samples)]:
                if spec.num_candidates:
                    result.candidates[name] = self._likely(spec, spec.num_candidates)
                else:
                    result.sampled[name] = self._draw(spec)
        left = self._due_s - self._clock()
        if left > 0:
            self._sleep(left)
        return result

    def _draw(self, spec: SampleSpec) -> SampledToken:
        wanted = spec.params.logprobs
        if wanted is None:
            return SampledToken(self._token(spec, 0))
        return SampledToken(self._token(spec, 0), -0.5, self._likely(spec, wanted))

    def _likely(self, spec: SampleSpec, count: int) -> tuple[TokenLogprob, ...]:
        count = min(count, len(self._drawn_ids))
        return tuple(TokenLogprob(self._token(spec, at), -0.5 - 0.25 * at) for at in range(count))

    def _token(self, spec: SampleSpec, at: int) -> int:
        ids = self._drawn_ids
        first = (spec.seed * 31 + spec.position * 7 + (spec.seed >> 7) * spec.position) % len(ids)
        return ids[(first + at) % len(ids)]


def _draws(row: Row) -> bool:
    return row.sample is not None or bool(row.branch_samples)
