"""What a request asks of the engine and what comes back, piece by piece. Plain data; no threads, no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.sampling_params import SamplingParams
from octavo.core.sharing import Sharing
from octavo.core.step import SampledToken


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to answer. `request_id` is unique among the open requests.

    `namespace` separates tenants in the prefix cache; a lower `priority` value is more urgent. With `every_token`
    False nothing comes back before the end, and then all of it at once: cheaper where nobody watches.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    namespace: str = ""
    priority: int = 0
    every_token: bool = True


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A drawn token with its log-probability. `text_offset`: characters of the answer that stand before it."""

    sampled: SampledToken
    text_offset: int


@dataclass(frozen=True, slots=True)
class GenerationDelta:
    """What was added to one answer since the last delta.

    Exactly one delta of a request, the last, has a `finish_reason`: "stop", "length", "abort" or "error"; the latter
    two say why in `error`. `stop_reason` is the stop string or token id that ended it (None: the model's own end).
    `scored_tokens` is filled only where log-probabilities were asked for, without an end token that is no part of the
    text. The counts are totals so far.

    A request for n answers has such deltas for each `branch` from 0 to n - 1. `open_branches` of them have not ended
    after this delta: with 0 and a `finish_reason` the request has ended. `score`, in a final delta, is what the answers
    were chosen by: the sum of log-probabilities, or the score of a beam. `num_generated_tokens` counts the tokens of
    all branches, those that are no answer too. `prompt_scores` are of tokens 1, 2, ... of the prompt; they may come in
    several deltas. `sharing`, in the last delta of a request with several branches, tells the memory that it saved.
    """

    text: str
    token_ids: tuple[int, ...]
    scored_tokens: tuple[ScoredToken, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    error: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    branch: int = 0
    open_branches: int = 0
    score: float | None = None
    num_generated_tokens: int = 0
    prompt_scores: tuple[SampledToken, ...] = ()
    sharing: Sharing | None = None


def merge_deltas(deltas: Sequence[GenerationDelta]) -> GenerationDelta:
    """Consecutive deltas of one branch of one request as one."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    return GenerationDelta(
        text="".join([delta.text for delta in deltas]),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        scored_tokens=tuple(scored for delta in deltas for scored in delta.scored_tokens),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
        num_output_tokens=last.num_output_tokens,
        branch=last.branch,
        open_branches=last.open_branches,
        score=last.score,
        num_generated_tokens=last.num_generated_tokens,
        prompt_scores=tuple(score for delta in deltas for score in delta.prompt_scores),
        sharing=last.sharing,
    )
