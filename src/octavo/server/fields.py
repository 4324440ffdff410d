"""The fields of a request: which there are, their types, and which are known but not supported yet.

A field that is not supported is refused by its name, never ignored; its one neutral value is accepted. It does not know
what the fields do.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from octavo.server.api_error import ApiError, invalid

Fields = TypeVar("Fields")

_PATH = re.compile(r" - at `\$\.?(?:key in )?([^`]*)`")


@dataclass(frozen=True, slots=True)
class CommonFields:
    """What chat and text completions have in common. `user` and `safety_identifier` name the end user in the log."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    # usual extras of open engines
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    kv_policy: str | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class CompletionFields:
    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ChatFields:
    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


# Known fields without support, and the values (beside null) that ask for nothing.
_NOT_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": (),
    "lora": (),
    "draft_model": (),
}


def check_names(body: Mapping[str, object], *known: type) -> None:
    """Raises ApiError 400 for the first field that is not supported, or that no version of the API has."""
    names = {field.name for fields in known for field in dataclasses.fields(fields)}
    for name, value in body.items():
        if name in names:
            continue
        if name not in _NOT_SUPPORTED:
            raise invalid(
                f"unknown field {name[:100]!r}; remove it, or check its spelling", name[:100], "unknown_parameter"
            )
        if value is None:
            continue
        neutral = _NOT_SUPPORTED[name]
        if not any(type(value) is type(accepted) and value == accepted for accepted in neutral):
            allowed = " or ".join(msgspec.json.encode(accepted).decode() for accepted in (*neutral, None))
            raise invalid(
                f"{name} is not supported by this version of octavo; leave it out, or send {allowed}",
                name,
                "unsupported_parameter",
            )


def convert(body: Mapping[str, object], fields: type[Fields]) -> Fields:
    """The part of the body that `fields` names, type-checked. Raises ApiError 400 that names the field."""
    names = [field.name for field in dataclasses.fields(fields)]  # type: ignore[arg-type]
    converted: Fields = checked({name: body[name] for name in names if name in body}, fields)
    return converted


def checked(value: object, kind: Any, *, at: str = "") -> Any:
    """The value as `kind`, strictly. `at` is the field that it stands in, for the message."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        found = _PATH.search(message)
        path = (at + (found.group(1) if found else "")).replace("..", ".")
        what = _PATH.sub("", message)
        raise invalid(
            f"{path}: {what[:1].lower()}{what[1:]}" if path else what, re.split(r"[.\[]", path)[0] or None
        ) from error


def wants_usage(fields: CommonFields) -> bool:
    """Whether a stream ends with a chunk of usage."""
    options = fields.stream_options
    if options is None:
        return False
    if not fields.stream:
        raise invalid("stream_options is only allowed with stream true", "stream_options")
    for name in options:
        if name != "include_usage":
            raise invalid(
                f"stream_options.{name[:100]} is not supported; only include_usage is",
                "stream_options",
                "unsupported_parameter",
            )
    value = options.get("include_usage")
    if value is not None and type(value) is not bool:
        raise invalid("stream_options.include_usage must be true or false", "stream_options")
    return bool(value)


def model_not_found(model: str, names: tuple[str, ...]) -> ApiError:
    known = ", ".join(repr(name) for name in names)
    return ApiError(
        404,
        f"the model {model[:200]!r} is not served here; this server has {known}",
        param="model",
        code="model_not_found",
    )
