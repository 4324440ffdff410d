"""One branch of a request while the engine works on it: tokens in, deltas of text out, until its one final delta.

It does not know threads, clocks of the machine or who reads the deltas.
"""

from __future__ import annotations

from octavo.core.request_output import RequestOutput
from octavo.core.step import SampledToken
from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.outputs import GenerationDelta, GenerationRequest, ScoredToken
from octavo.engine.stop_strings import StopChecker


class OpenBranch:
    """Turns the core's outputs into deltas. Made by the caller's thread, then owned by the engine's."""

    __slots__ = (
        "_checker",
        "_detokenizer",
        "_held_scores",
        "_keeps_stop_text",
        "_min_tokens",
        "_num_cached_tokens",
        "_num_characters",
        "_num_generated_tokens",
        "_num_output_tokens",
        "_num_sent_characters",
        "_prompt_scores",
        "_score",
        "_wants_scores",
        "is_finished",
        "last_token_s",
        "number",
        "request",
        "sum_logprobs",
    )

    def __init__(self, request: GenerationRequest, number: int, detokenizer: IncrementalDetokenizer) -> None:
        params = request.params
        self.request = request
        self.number = number
        self.sum_logprobs = 0.0  # of the tokens drawn, where the core tells their log-probabilities
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
        self._num_generated_tokens = 0
        self._score: float | None = None
        self._prompt_scores: tuple[SampledToken, ...] = ()  # those that the next delta brings
        self.is_finished = False  # Invariant: at most one delta of a branch has a finish_reason

    def push(self, output: RequestOutput) -> GenerationDelta:
        """The delta of one step. Its `finish_reason` "stop" may be this object's own: a stop string was found."""
        assert not self.is_finished, f"request {self.request.request_id} got an output after its final answer"
        self._num_cached_tokens = output.num_cached_tokens
        self._num_output_tokens = output.num_output_tokens
        self._num_generated_tokens = output.num_generated_tokens
        self._score, self._prompt_scores = output.score, output.prompt_scores
        token = output.token
        if token is not None and token.logprob is not None:
            self.sum_logprobs += token.logprob
        token_ids = output.token_ids if token is None else (token.token_id,)
        # From the core "stop" means that the last token is an end token: no part of the answer, unless asked for.
        hides_last = output.finish_reason == "stop" and not self._keeps_stop_text
        shown = token_ids[:-1] if hides_last else token_ids
        new_text = "".join([self._detokenizer.push(token_id) for token_id in shown])
        if output.finish_reason is not None:
            new_text += self._detokenizer.flush()
        if self._wants_scores and token is not None and shown:
            self._held_scores.append(ScoredToken(token, self._num_characters))
        self._num_characters += len(new_text)
        text, finish_reason, stop_reason = self._check_stops(new_text, output)
        scored = self._take_scores(text, is_cut=isinstance(stop_reason, str))
        return self._delta(text, token_ids, scored, finish_reason, stop_reason, output.error)

    def end(self, finish_reason: str, error: str) -> GenerationDelta:
        """The final delta of a request that ends from outside: aborted, or with the engine."""
        assert not self.is_finished, f"request {self.request.request_id} was ended twice"
        held = self._detokenizer.flush()
        if self._checker is not None:
            sent, _ = self._checker.push(held)
            held = sent + self._checker.flush()
        return self._delta(held, (), self._take_scores(held, is_cut=False), finish_reason, None, error)

    def give_up(self, finish_reason: str, error: str) -> GenerationDelta:
        """The final delta where no more text can be had: it asks nothing of the parts that may have failed."""
        return self._delta("", (), (), finish_reason, None, error)

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
        token_ids: tuple[int, ...],
        scored: tuple[ScoredToken, ...],
        finish_reason: str | None,
        stop_reason: str | int | None,
        error: str | None,
    ) -> GenerationDelta:
        self.is_finished = finish_reason is not None
        prompt_scores, self._prompt_scores = self._prompt_scores, ()
        return GenerationDelta(
            text=text,
            token_ids=token_ids,
            scored_tokens=scored,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            error=error,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            branch=self.number,
            score=self._score,
            num_generated_tokens=self._num_generated_tokens,
            prompt_scores=prompt_scores,
        )
