"""A whole answer, put together from its deltas. Plain data for scripts; it does not know how it came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.core.sampling_params import SamplingParams
from octavo.core.sharing import Sharing
from octavo.core.step import SampledToken
from octavo.engine.outputs import GenerationDelta, merge_deltas


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `finish_reason`: "stop", "length" or, for a request that failed while it ran, "error" with `error`.

    `stop_reason` is the stop string or stop token id that ended it; None where the model ended by itself.
    `logprobs`, where they were asked for, has one entry for each token that has a part in the text, `prompt_logprobs`
    one for each token of the prompt (None for the first). Of a request for several answers this is the first, and
    `alternatives` are the others.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[SampledToken, ...] | None
    num_prompt_tokens: int
    num_cached_tokens: int
    error: str | None = None
    branch: int = 0
    score: float | None = None  # what answers were chosen by: a sum of log-probabilities, or the score of a beam
    alternatives: tuple[Completion, ...] = ()
    num_generated_tokens: int = 0  # by all branches of the request, also those that are no answer
    prompt_logprobs: tuple[SampledToken | None, ...] | None = None
    sharing: Sharing | None = None  # the memory that the request's branches saved, where it has several

    @property
    def answers(self) -> tuple[Completion, ...]:
        """All answers of the request, in order; of a choice among more branches the best first."""
        return (replace(self, alternatives=()), *self.alternatives)


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """A search for the most likely texts, as in transformers' `generate(num_beams=width)`.

    A score is the sum of the log-probabilities / length ** length_penalty. `early_stopping`: True, False or "never".
    `num_answers` None: as many as the width.
    """

    width: int = 4
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_answers: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError for what cannot be had."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=0.0,
            n=self.width if self.num_answers is None else self.num_answers,
            best_of=self.width,
            use_beam_search=True,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
        )


@dataclass(frozen=True, slots=True)
class Beam:
    """One text that a beam search found. `token_ids` has its end token, where it ended by one."""

    text: str
    token_ids: tuple[int, ...]
    score: float
    finish_reason: str


def completion_of(deltas: Sequence[GenerationDelta], params: SamplingParams) -> Completion:
    """All deltas of a request -> its first answer, with the others as alternatives."""
    of_branch: dict[int, list[GenerationDelta]] = {}
    for delta in deltas:
        of_branch.setdefault(delta.branch, []).append(delta)
    wholes = [merge_deltas(of_branch[branch]) for branch in sorted(of_branch)]
    generated = max(whole.num_generated_tokens for whole in wholes)
    sharing = next((whole.sharing for whole in wholes if whole.sharing is not None), None)
    first, *others = [_completion(whole, params, generated, sharing) for whole in wholes]
    return replace(first, alternatives=tuple(others))


def _completion(
    whole: GenerationDelta, params: SamplingParams, num_generated_tokens: int, sharing: Sharing | None
) -> Completion:
    assert whole.finish_reason is not None
    asks_prompt = params.prompt_logprobs is not None and whole.branch == 0
    return Completion(
        text=whole.text,
        token_ids=whole.token_ids,
        finish_reason=whole.finish_reason,
        stop_reason=whole.stop_reason,
        logprobs=tuple(scored.sampled for scored in whole.scored_tokens) if params.logprobs is not None else None,
        num_prompt_tokens=whole.num_prompt_tokens,
        num_cached_tokens=whole.num_cached_tokens,
        error=whole.error,
        branch=whole.branch,
        score=whole.score,
        num_generated_tokens=num_generated_tokens,
        prompt_logprobs=(None, *whole.prompt_scores) if asks_prompt else None,
        sharing=sharing,
    )
