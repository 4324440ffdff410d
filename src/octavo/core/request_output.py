"""What a step tells the outside about one request. Plain data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.beam_search import Hypothesis
from octavo.core.branches import Branches
from octavo.core.request import Request
from octavo.core.sharing import Sharing
from octavo.core.step import SampledToken

FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One per branch that got a token or its end in this step, or scores of its prompt.

    Exactly one of each branch has a finish reason; a beam search tells nothing before its end, and then as many
    branches as were asked for.
    """

    request_id: str
    token: SampledToken | None  # None when a request ends without a new token
    finish_reason: str | None  # None, or one of FINISH_REASONS
    stop_reason: int | None  # the stop or end-of-sequence token id, when one ended the request
    error: str | None  # why it failed, with finish_reason "error"
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    branch: int = 0
    open_branches: int = 0  # branches of the request that have not told their end yet; with 0 and a reason it has ended
    num_generated_tokens: int = 0  # by all branches together
    prompt_scores: tuple[SampledToken, ...] = ()  # of tokens 1, 2, ... of the prompt, those that this step computed
    token_ids: tuple[int, ...] = ()  # of a beam search: the whole text
    score: float | None = None  # of a beam search
    sharing: Sharing | None = None  # with the end of a request that has several branches


def output_of(request: Request, token: SampledToken | None, error: str | None = None) -> RequestOutput:
    """What there is to tell about a branch now; if it has ended, its group has forgotten it already."""
    group, num_output_tokens = request.group, len(request.token_ids) - request.num_prompt_tokens
    if group is None:
        name, num_open, generated = request.request_id, int(request.finish_reason is None), num_output_tokens
    else:
        name, num_open, generated = group.request_id, len(group.open), group.num_generated_tokens
    return RequestOutput(
        name,
        token,
        request.finish_reason,
        request.stop_reason,
        error,
        request.num_prompt_tokens,
        request.num_cached_tokens,
        num_output_tokens,
        request.branch,
        num_open,
        generated,
        sharing=group.sharing if group is not None and not num_open else None,
    )


def beam_outputs(group: Branches, root: Request, found: list[Hypothesis], error: str | None) -> list[RequestOutput]:
    """The ends of a beam search: what it found, or for one that ended from outside as many ends without a text."""
    finish_reason = root.finish_reason
    outputs = []
    for branch in range(root.params.n):
        one = found[branch] if found else None
        reason = finish_reason if one is None else one.finish_reason
        token_ids = () if one is None else one.token_ids
        num_open = root.params.n - 1 - branch
        outputs.append(
            RequestOutput(
                group.request_id,
                None,
                reason,
                token_ids[-1] if reason == "stop" and token_ids else None,
                error,
                root.num_prompt_tokens,
                root.num_cached_tokens,
                len(token_ids),
                branch,
                num_open,
                group.num_generated_tokens,
                token_ids=token_ids,
                score=None if one is None else one.score,
                sharing=None if num_open else group.sharing,
            )
        )
    return outputs
