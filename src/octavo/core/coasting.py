"""Requests about which nothing is decided for a while: each step gives them one token, and that is all that happens.

Between two block edges a request that only decodes grows by no block, commits none and does not end. Where nobody wants
to hear each of its tokens, as in a replay, it needs no row in the plan for so long: it coasts. The plan says how many
coast, what they hold is left alone, and what they did meanwhile is made up for when they wake: at their next edge, at
their last token, and before anybody looks at them or takes something from them. So every block event and every decision
is the same with and without; tests hold that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from octavo.core.config import SchedulerConfig
from octavo.core.request import Request
from octavo.core.status import Counters
from octavo.core.step import CoastingRows


class TokenSource(Protocol):
    """Knows afterwards what a request drew."""

    def drawn(self, request_id: str, position: int, count: int) -> Sequence[int]:
        """Output tokens [position, position + count) of a request: one of each step that it coasted."""
        ...


class Coasting:
    """Of one scheduler; without a source nobody coasts. A request that coasts stands where it was last looked at.

    Invariant: of a request that coasts everything that admission reckons with (see `Room`) stays as it is meanwhile.
    """

    __slots__ = ("_config", "_counters", "_num_steps", "_source", "_start_sum", "num", "size")

    def __init__(
        self, config: SchedulerConfig, block_size: int, counters: Counters, source: TokenSource | None
    ) -> None:
        self.size = block_size
        self.num = 0  # requests that coast now
        self._config = config
        self._counters = counters
        self._source = source if config.enable_kv_cache else None
        self._num_steps = 0  # steps taken in
        self._start_sum = 0  # of those that coast: computed tokens less the steps taken in, when they began

    @property
    def is_on(self) -> bool:
        return self._source is not None

    def rows(self) -> CoastingRows:
        """What the step does that is being planned, for those that coast."""
        return CoastingRows(self.num, self._start_sum + self.num * (self._num_steps + 1))

    def step_taken(self) -> None:
        """A step was carried out: those that coast have one token more."""
        self._num_steps += 1

    def wake_if_due(self, request: Request) -> bool:
        """Whether one that coasts needs a row in the next step, and coasts no more."""
        if request.coasts_until > self._num_steps:
            return False
        self.wake(request)
        return True

    def begin(self, request: Request) -> None:
        """A request has just drawn a token and goes on: it coasts, if its next steps are all alike."""
        if self._source is None or not _only_decodes(request):
            return
        known, params = len(request.token_ids), request.params
        filled = request.num_computed_tokens % self.size
        left = min(params.max_tokens - (known - request.num_prompt_tokens), self._config.max_model_len - known)
        steps = min(self.size - 1 - filled, left - 1)
        if not filled or steps < 1:
            return
        request.coasts_from, request.coasts_until = self._num_steps, self._num_steps + steps
        self.num += 1
        self._start_sum += request.num_computed_tokens - self._num_steps

    def wake(self, request: Request) -> None:
        """From now on the request needs rows again; one that does not coast does anyway."""
        if request.coasts_until:
            self.catch_up(request)
            self.num -= 1
            self._start_sum -= request.num_computed_tokens - self._num_steps
            request.coasts_from = request.coasts_until = 0

    def catch_up_all(self, requests: Sequence[Request]) -> None:
        """Before anybody looks at them."""
        if self.num:
            for request in requests:
                self.catch_up(request)

    def catch_up(self, request: Request) -> None:
        """Make up for the steps that the request coasted through so far."""
        start, count = request.num_computed_tokens, self._num_steps - request.coasts_from
        if not request.coasts_until or not count:
            return
        assert self._source is not None
        request.token_ids.extend(self._source.drawn(request.request_id, request.num_output_tokens, count))
        request.num_computed_tokens += count
        request.coasts_from = self._num_steps
        self._counters.account(request, start, start + count)
        self._counters.generation += count


def _only_decodes(request: Request) -> bool:
    """Whether tokens alone come of its steps, whichever they are, and only its last known token is not computed."""
    params = request.params
    return (
        request.group is None
        and request.drops is None
        and not request.stop_token_ids
        and not request.needs_token_history
        and params.logprobs is None
        and params.prompt_logprobs is None
        and len(request.token_ids) - request.num_computed_tokens == 1
    )
