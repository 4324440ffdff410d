"""What a step tells the outside about one request. Plain data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.request import Request
from octavo.core.step import SampledToken

FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One per request that got a token or its end in this step; exactly one of a request has a finish reason."""

    request_id: str
    token: SampledToken | None  # None when a request ends without a new token
    finish_reason: str | None  # None, or one of FINISH_REASONS
    stop_reason: int | None  # the stop or end-of-sequence token id, when one ended the request
    error: str | None  # why it failed, with finish_reason "error"
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


def output_of(request: Request, token: SampledToken | None, error: str | None = None) -> RequestOutput:
    """What there is to tell about a request now."""
    return RequestOutput(
        request.request_id,
        token,
        request.finish_reason,
        request.stop_reason,
        error,
        request.num_prompt_tokens,
        request.num_cached_tokens,
        len(request.token_ids) - request.num_prompt_tokens,
    )
