"""One request while the engine works on it: outputs of the core in, deltas of its answers out, until each has ended.

Where the answers are known only at the end (the best of several branches), or nobody watches, it keeps them until then.
It does not know threads, clocks of the machine or who reads the deltas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from octavo.core.request_output import RequestOutput
from octavo.core.sharing import Sharing
from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.open_branch import OpenBranch
from octavo.engine.outputs import GenerationDelta, GenerationRequest, merge_deltas


class OpenRequest:
    """Made by the caller's thread, then owned by the engine's."""

    __slots__ = ("_branches", "_keeps", "_kept", "_num_generated_tokens", "_sharing", "arrived_s", "request", "seed")

    def __init__(
        self,
        request: GenerationRequest,
        new_detokenizer: Callable[[], IncrementalDetokenizer],
        seed: int,
        arrived_s: float,
    ) -> None:
        params = request.params
        self.request = request
        self.seed = seed
        self.arrived_s = arrived_s
        count = params.n if params.use_beam_search else params.num_branches
        self._branches = [OpenBranch(request, number, new_detokenizer()) for number in range(count)]
        self._keeps = params.answers_at_end or not request.every_token
        self._kept: list[list[GenerationDelta]] = [[] for _ in range(count)]
        self._num_generated_tokens = 0
        self._sharing: Sharing | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every answer has ended, and was delivered."""
        return all(branch.is_finished for branch in self._branches)

    def branch(self, number: int) -> OpenBranch:
        return self._branches[number]

    def push(self, output: RequestOutput) -> tuple[list[GenerationDelta], bool]:
        """What to deliver now, and whether a stop string ended the branch, which the core does not know."""
        branch = self._branches[output.branch]
        self._num_generated_tokens = max(self._num_generated_tokens, output.num_generated_tokens)
        self._sharing = output.sharing or self._sharing
        if branch.is_finished:  # by a stop string: this is the core's own end of it
            return [], False
        delta = branch.push(output)
        return self._deliver(delta), branch.is_finished and output.finish_reason is None

    def end(self, finish_reason: str, error: str) -> list[GenerationDelta]:
        """The final deltas of a request that ends from outside: aborted, or with the engine."""
        open_ones = [branch for branch in self._branches if not branch.is_finished]
        return [one for branch in open_ones for one in self._deliver(branch.end(finish_reason, error))]

    def give_up(self, finish_reason: str, error: str) -> list[GenerationDelta]:
        """The final deltas where no more text can be had: it asks nothing of the parts that may have failed."""
        open_ones = [branch for branch in self._branches if not branch.is_finished]
        return [one for branch in open_ones for one in self._deliver(branch.give_up(finish_reason, error))]

    def _deliver(self, delta: GenerationDelta) -> list[GenerationDelta]:
        num_open = sum(not branch.is_finished for branch in self._branches)
        if not self._keeps:
            if len(self._branches) == 1:
                return [delta]
            return [replace(delta, open_branches=num_open, sharing=None if num_open else self._sharing)]
        self._kept[delta.branch].append(delta)
        return [] if num_open else self._answers()

    def _answers(self) -> list[GenerationDelta]:
        """All of them, where they were kept to the end: the best first, if there were more branches than answers."""
        params = self.request.params
        wholes = [merge_deltas(deltas) for deltas in self._kept]
        if len(wholes) == 1:
            return [replace(wholes[0], sharing=self._sharing)] if params.use_beam_search else wholes
        if len(wholes) > params.n:
            scored = [replace(one, score=self._branches[one.branch].sum_logprobs) for one in wholes]
            # What failed comes first: it must not be passed over in silence.
            scored.sort(key=lambda one: (one.error is None, -(one.score or 0.0), one.branch))
            wholes = scored[: params.n]
        prompt_scores = (self._kept[0] and merge_deltas(self._kept[0]).prompt_scores) or ()
        last = len(wholes) - 1
        return [
            replace(
                one,
                branch=number,
                open_branches=last - number,
                num_generated_tokens=self._num_generated_tokens,
                prompt_scores=() if number else prompt_scores,
                sharing=self._sharing if number == last else None,
            )
            for number, one in enumerate(wholes)
        ]
