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
from octavo.server.usage import cached_tokens, usage_of

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
class AnswerShape:
    """So many prompts, so many answers to each: choice p x num_answers + a is answer a to prompt p."""

    num_prompts: int
    num_answers: int

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.num_answers

    def choice(self, prompt: int, delta: GenerationDelta) -> int:
        return prompt * self.num_answers + delta.branch


@dataclass(frozen=True, slots=True)
class AnswerLabel:
    """How the log names a request: its id, and the end user where the client named one."""

    request_id: str
    user: str | None


def event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


def choice_end(delta: GenerationDelta, scores: object) -> dict[str, object]:
    """What both dialects say of a choice after its text."""
    fields = {"logprobs": scores, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
    return fields if delta.score is None else {**fields, "octavo": {"score": delta.score}}


async def whole_answer(
    generation: Generation, shape: AnswerShape, answer: AnswerFormat, label: AnswerLabel
) -> dict[str, object]:
    """Raises ApiError when one of the choices cannot be had; the others are ended then."""
    parts: list[list[GenerationDelta]] = [[] for _ in range(shape.num_choices)]
    try:
        while not generation.finished:
            for prompt, delta in await generation.take():
                _raise_failure(delta)
                parts[shape.choice(prompt, delta)].append(delta)
    finally:
        generation.close()
    choices = [merge_deltas(deltas) for deltas in parts]
    _log_answer(label, choices, shape)
    return answer.whole(choices, usage_of(choices, shape.num_answers))


async def event_stream(
    generation: Generation, shape: AnswerShape, answer: AnswerFormat, label: AnswerLabel, *, include_usage: bool
) -> AsyncIterator[bytes]:
    """Server-sent events. Raises ApiError when a choice cannot be had, after the text there was; all are ended then."""
    latest: list[GenerationDelta | None] = [None] * shape.num_choices
    try:
        while not generation.finished:
            taken = [(shape.choice(prompt, delta), delta) for prompt, delta in await generation.take()]
            written = b"".join([answer.chunk(index, _shown(delta)) for index, delta in taken])
            if written:
                yield written
            for index, delta in taken:
                _raise_failure(delta)
                latest[index] = delta
    finally:
        generation.close()
    choices = [delta for delta in latest if delta is not None]
    _log_answer(label, choices, shape)
    yield (answer.usage_chunk(usage_of(choices, shape.num_answers)) if include_usage else b"") + DONE


def _shown(delta: GenerationDelta) -> GenerationDelta:
    """A failure is no finish reason of a choice: it comes as an error of its own."""
    return replace(delta, finish_reason=None) if delta.error is not None else delta


def _raise_failure(delta: GenerationDelta) -> None:
    if delta.finish_reason == "abort":
        raise unavailable(delta.error or "the request was aborted")
    if delta.finish_reason == "error":
        raise ApiError(500, delta.error or "the request failed", kind="server_error", code="generation_failed")


def _log_answer(label: AnswerLabel, choices: list[GenerationDelta], shape: AnswerShape) -> None:
    if log.isEnabledFor(logging.INFO):
        usage = usage_of(choices, shape.num_answers)
        log.info(
            "%s: %s prompt tokens (%s cached), %s output tokens, ended by %s, user %r",
            label.request_id,
            usage["prompt_tokens"],
            cached_tokens(choices, shape.num_answers),
            usage["completion_tokens"],
            ",".join(str(choice.finish_reason) for choice in choices),
            label.user,
        )
