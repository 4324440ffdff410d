"""One request while the engine works on it: tokens in, deltas of text out, until its one final delta.

It does not know threads, clocks of the machine or who reads the deltas.
"""

from __future__ import annotations

from octavo.core.request_output import RequestOutput
from octavo.core.step import SampledToken
from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.outputs import GenerationDelta, GenerationRequest, ScoredToken, merge_deltas
from octavo.engine.stop_strings import StopChecker


class OpenRequest:
    """Turns the core's outputs into deltas. Made by the caller's thread, then owned by the engine's."""

    __slots__ = (
        "_checker",
        "_detokenizer",
        "_finished",
        "_held_scores",
        "_keeps_stop_text",
        "_min_tokens",
        "_num_cached_tokens",
        "_num_characters",
        "_num_output_tokens",
        "_num_sent_characters",
        "_pending",
        "_wants_scores",
        "arrived_s",
        "last_token_s",
        "request",
        "seed",
    )

    def __init__(
        self, request: GenerationRequest, detokenizer: IncrementalDetokenizer, seed: int, arrived_s: float
    ) -> None:
        params = request.params
        self.request = request
        self.seed = seed
        self.arrived_s = arrived_s
        self.last_token_s: float | None = None
        self._detokenizer = detokenizer
        self._checker = StopChecker(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._keeps_stop_text = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._wants_scores = params.logprobs is not None
        self._num_cached_tokens = 0
        self._num_output_tokens = 0
        self._num_characters = 0  # of the text, also of what is held back as it may become a stop string
        self._num_sent_characters = 0
        self._held_scores: list[ScoredToken] = []  # Invariant: of tokens whose text begins behind what was sent
        self._pending: list[GenerationDelta] = []  # what a request that waits for its end has so far
        self._finished = False  # Invariant: at most one delta of a request has a finish_reason

    def push(self, output: RequestOutput) -> GenerationDelta:
        """The delta of one step. Its `finish_reason` "stop" may be this object's own: a stop string was found."""
        assert not self._finished, f"request {self.request.request_id} got an output after its final answer"
        self._num_cached_tokens = output.num_cached_tokens
        self._num_output_tokens = output.num_output_tokens
        # From the core "stop" means that this token is an end token: no part of the answer, unless it was asked for.
        shown = output.token if output.finish_reason != "stop" or self._keeps_stop_text else None
        new_text = "" if shown is None else self._detokenizer.push(shown.token_id)
        if output.finish_reason is not None:
            new_text += self._detokenizer.flush()
        if self._wants_scores and shown is not None:
            self._held_scores.append(ScoredToken(shown, self._num_characters))
        self._num_characters += len(new_text)
        text, finish_reason, stop_reason = self._check_stops(new_text, output)
        scored = self._take_scores(text, is_cut=isinstance(stop_reason, str))
        return self._delta(text, output.token, scored, finish_reason, stop_reason, output.error)

    def end(self, finish_reason: str, error: str) -> GenerationDelta:
        """The final delta of a request that ends from outside: aborted, or with the engine."""
        assert not self._finished, f"request {self.request.request_id} was ended twice"
        held = self._detokenizer.flush()
        if self._checker is not None:
            sent, _ = self._checker.push(held)
            held = sent + self._checker.flush()
        return self._delta(held, None, self._take_scores(held, is_cut=False), finish_reason, None, error)

    def give_up(self, finish_reason: str, error: str) -> GenerationDelta:
        """The final delta where no more text can be had: it asks nothing of the parts that may have failed."""
        return self._delta("", None, (), finish_reason, None, error)

    def collect(self, delta: GenerationDelta) -> GenerationDelta | None:
        """What to deliver now: the delta itself, or for a request that waits for its end nothing before it."""
        if self.request.every_token:
            return delta
        self._pending.append(delta)
        return merge_deltas(self._pending) if delta.finish_reason is not None else None

    def _take_scores(self, text: str, *, is_cut: bool) -> tuple[ScoredToken, ...]:
        """The scores of the tokens that `text`, which is sent now, consists of. A token cut in two counts as sent."""
        self._num_sent_characters += len(text)
        if self._num_sent_characters == self._num_characters and not is_cut:  # nothing is held back
            ready, self._held_scores = self._held_scores, []
        else:
            ready = [scored for scored in self._held_scores if scored.text_offset < self._num_sent_characters]
            self._held_scores = self._held_scores[len(ready) :]
        return tuple(ready)

    def _check_stops(self, new_text: str, output: RequestOutput) -> tuple[str, str | None, str | int | None]:
        # The model's own end gives no stop reason; only what the client listed does.
        stop_token = output.stop_reason if output.stop_reason in self.request.params.stop_token_ids else None
        if self._checker is None or output.num_output_tokens < self._min_tokens:
            return new_text, output.finish_reason, stop_token
        text, matched = self._checker.push(new_text)
        if matched is not None and output.finish_reason not in ("abort", "error"):
            return text, "stop", matched
        if output.finish_reason is not None:
            text += self._checker.flush()
        return text, output.finish_reason, stop_token

    def _delta(
        self,
        text: str,
        token: SampledToken | None,
        scored: tuple[ScoredToken, ...],
        finish_reason: str | None,
        stop_reason: str | int | None,
        error: str | None,
    ) -> GenerationDelta:
        self._finished = finish_reason is not None
        return GenerationDelta(
            text=text,
            token_ids=() if token is None else (token.token_id,),
            scored_tokens=scored,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            error=error,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
        )
