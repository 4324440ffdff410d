"""What a step tells the outside about one request. Plain data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.core.beam_search import Hypothesis
from octavo.core.branches import Branches
from octavo.core.request import Request
from octavo.core.sharing import Sharing
from octavo.core.step import SampledToken

FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class BranchPart:
    """What there is to tell beyond one token: of a request with several branches, or about its prompt."""

    branch: int = 0
    open_branches: int = 1  # branches of the request that have not told their end yet; with 0 it has ended
    num_generated_tokens: int = 0  # by all branches together
    prompt_scores: tuple[SampledToken, ...] = ()  # of tokens 1, 2, ... of the prompt, those that this step computed
    token_ids: tuple[int, ...] = ()  # of a beam search: the whole text
    score: float | None = None  # of a beam search
    sharing: Sharing | None = None  # with the end of a request that has several branches


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
    part: BranchPart | None = None  # None where there is only the one branch: most outputs are made without it, quickly

    @property
    def branch(self) -> int:
        return 0 if self.part is None else self.part.branch

    @property
    def open_branches(self) -> int:
        return int(self.finish_reason is None) if self.part is None else self.part.open_branches

    @property
    def num_generated_tokens(self) -> int:
        return self.num_output_tokens if self.part is None else self.part.num_generated_tokens

    @property
    def prompt_scores(self) -> tuple[SampledToken, ...]:
        return () if self.part is None else self.part.prompt_scores

    @property
    def token_ids(self) -> tuple[int, ...]:
        return () if self.part is None else self.part.token_ids

    @property
    def score(self) -> float | None:
        return None if self.part is None else self.part.score

    @property
    def sharing(self) -> Sharing | None:
        return None if self.part is None else self.part.sharing


def output_of(request: Request, token: SampledToken | None, error: str | None = None) -> RequestOutput:
    """What there is to tell about a branch now; if it has ended, its group has forgotten it already."""
    group = request.group
    return RequestOutput(
        request.request_id if group is None else group.request_id,
        token,
        request.finish_reason,
        request.stop_reason,
        error,
        request.num_prompt_tokens,
        request.num_cached_tokens,
        len(request.token_ids) - request.num_prompt_tokens,
        None if group is None else _part_of(request.branch, group),
    )


def with_scores(output: RequestOutput, scores: tuple[SampledToken, ...]) -> RequestOutput:
    """The same, telling about the prompt as well."""
    part = output.part or BranchPart(0, output.open_branches, output.num_output_tokens)
    return replace(output, part=replace(part, prompt_scores=scores))


def _part_of(branch: int, group: Branches) -> BranchPart:
    num_open = len(group.open)
    return BranchPart(branch, num_open, group.num_generated_tokens, sharing=None if num_open else group.sharing)


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
                BranchPart(
                    branch,
                    num_open,
                    group.num_generated_tokens,
                    token_ids=token_ids,
                    score=None if one is None else one.score,
                    sharing=None if num_open else group.sharing,
                ),
            )
        )
    return outputs
