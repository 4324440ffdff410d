"""Reads generations to their end and hands them on, whole or as server-sent events. It does not know any dialect."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from octavo.engine.async_engine import Generation
from octavo.engine.outputs import GenerationDelta, merge_deltas
from octavo.server.api_error import ApiError, unavailable

log = logging.getLogger("octavo.requests")

DONE = b"data: [DONE]\n\n"
encode_json = msgspec.json.Encoder().encode


class AnswerFormat(Protocol):
    """One dialect's way to write an answer of one or more choices."""

    def chunk(self, index: int, delta: GenerationDelta) -> bytes:
        """A server-sent event, or nothing for a delta that a client could not see."""

    def usage_chunk(self, usage: dict[str, object]) -> bytes: ...

    def whole(self, choices: list[GenerationDelta], usage: dict[str, object]) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True)
class AnswerLabel:
    """How the log names a request: its id, and the end user where the client named one."""

    request_id: str
    user: str | None


def event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


def usage_of(choices: list[GenerationDelta]) -> dict[str, object]:
    """Token counts of all choices together; `prompt_tokens` includes the cached ones."""
    prompt = sum(choice.num_prompt_tokens for choice in choices)
    output = sum(choice.num_output_tokens for choice in choices)
    cached = sum(choice.num_cached_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def whole_answer(
    generation: Generation, num_choices: int, answer: AnswerFormat, label: AnswerLabel
) -> dict[str, object]:
    """Raises ApiError when one of the choices cannot be had; the others are ended then."""
    parts: list[list[GenerationDelta]] = [[] for _ in range(num_choices)]
    try:
        while not generation.finished:
            for index, delta in await generation.take():
                _raise_failure(delta)
                parts[index].append(delta)
    finally:
        generation.close()
    choices = [merge_deltas(deltas) for deltas in parts]
    _log_answer(label, choices)
    return answer.whole(choices, usage_of(choices))


async def event_stream(
    generation: Generation, num_choices: int, answer: AnswerFormat, label: AnswerLabel, *, include_usage: bool
) -> AsyncIterator[bytes]:
    """Server-sent events. Raises ApiError when a choice cannot be had, after the text there was; all are ended then."""
    latest: list[GenerationDelta | None] = [None] * num_choices
    try:
        while not generation.finished:
            taken = await generation.take()
            written = b"".join([answer.chunk(index, _shown(delta)) for index, delta in taken])
            if written:
                yield written
            for index, delta in taken:
                _raise_failure(delta)
                latest[index] = delta
    finally:
        generation.close()
    choices = [delta for delta in latest if delta is not None]
    _log_answer(label, choices)
    yield (answer.usage_chunk(usage_of(choices)) if include_usage else b"") + DONE


def _shown(delta: GenerationDelta) -> GenerationDelta:
    """A failure is no finish reason of a choice: it comes as an error of its own."""
    return replace(delta, finish_reason=None) if delta.error is not None else delta


def _raise_failure(delta: GenerationDelta) -> None:
    if delta.finish_reason == "abort":
        raise unavailable(delta.error or "the request was aborted")
    if delta.finish_reason == "error":
        raise ApiError(500, delta.error or "the request failed", kind="server_error", code="generation_failed")


def _log_answer(label: AnswerLabel, choices: list[GenerationDelta]) -> None:
    if log.isEnabledFor(logging.INFO):
        usage = usage_of(choices)
        ends = ",".join(str(choice.finish_reason) for choice in choices)
        cached = sum(choice.num_cached_tokens for choice in choices)
        log.info(
            "%s: %s prompt tokens (%s cached), %s output tokens, ended by %s, user %r",
            label.request_id,
            usage["prompt_tokens"],
            cached,
            usage["completion_tokens"],
            ends,
            label.user,
        )
