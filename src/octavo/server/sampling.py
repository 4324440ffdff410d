"""From the fields of a request to SamplingParams: defaults, names and bounds. It does not know how tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequestError
from octavo.server.api_error import invalid
from octavo.server.fields import CommonFields
from octavo.server.served_model import ServedModel

MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 4096
MAX_PRIORITY = 2**31 - 1
HOW_TO_DRAW = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """How many tokens may be drawn, and the field that said so (None: the server's default)."""

    max_tokens: int
    param: str | None


@dataclass(frozen=True, slots=True)
class WantedScores:
    """How many most likely tokens to tell beside each one of the answer and of the prompt (None: no scores at all).

    `param` is the field that said so.
    """

    answer: int | None
    param: str
    prompt: int | None = None


def sampling_params(
    fields: CommonFields, model: ServedModel, limit: TokenLimit, scores: WantedScores
) -> SamplingParams:
    """Raises ApiError or InvalidRequestError naming the field as the client wrote it."""
    beams = bool(fields.use_beam_search)
    # Advice on how to draw is not for beam search, which draws nothing.
    defaults = {name: value for name, value in model.default_sampling.items() if not (beams and name in HOW_TO_DRAW)}

    def number(name: str, otherwise: float) -> float:
        given = getattr(fields, name)
        return float(defaults.get(name, otherwise) if given is None else given)

    top_k = int(defaults.get("top_k", 0)) if fields.top_k is None else fields.top_k
    try:
        return SamplingParams(
            max_tokens=limit.max_tokens,
            min_tokens=fields.min_tokens or 0,
            temperature=number("temperature", 1.0),
            top_k=min(top_k, model.vocab_size),
            top_p=number("top_p", 1.0),
            min_p=number("min_p", 0.0),
            repetition_penalty=number("repetition_penalty", 1.0),
            presence_penalty=number("presence_penalty", 0.0),
            frequency_penalty=number("frequency_penalty", 0.0),
            logit_bias=_logit_bias(fields.logit_bias or {}, model.vocab_size),
            seed=fields.seed,
            stop=_stop_strings(fields.stop),
            stop_token_ids=_stop_token_ids(fields.stop_token_ids or [], model.vocab_size),
            ignore_eos=bool(fields.ignore_eos),
            logprobs=scores.answer,
            include_stop_str_in_output=bool(fields.include_stop_str_in_output),
            n=1 if fields.n is None else fields.n,
            best_of=fields.best_of,
            use_beam_search=beams,
            length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
            early_stopping=False if fields.early_stopping is None else fields.early_stopping,
            prompt_logprobs=scores.prompt,
            kv_policy=fields.kv_policy,
        )
    except InvalidRequestError as error:
        renamed = {"max_tokens": limit.param or "max_tokens", "logprobs": scores.param}
        ours = error.param or ""
        message = str(error)
        theirs = renamed.get(ours, ours)
        raise InvalidRequestError(
            message.replace(ours, theirs, 1) if ours else message, param=theirs or None
        ) from error


def check_branches(params: SamplingParams, num_prompts: int, max_branches: int, *, stream: bool) -> None:
    """Raises ApiError 400 for a stream of what is known at the end only, and for too many branches in one request."""
    name = "n" if params.best_of is None else "best_of"
    if stream and params.answers_at_end:
        why = "use_beam_search" if params.use_beam_search else f"best_of {params.best_of} above n {params.n}"
        raise invalid(
            f"stream is true with {why}: no part of an answer is known before all branches have ended; send stream "
            f"false, or leave {'use_beam_search' if params.use_beam_search else 'best_of'} out",
            "stream",
        )
    width = params.num_branches
    if width > 1 and width * num_prompts > max_branches:
        raise invalid(
            f"{num_prompts} prompts x {name} {width} = {num_prompts * width} branches; this server takes at most "
            f"{max_branches} in one request",
            name,
        )


def priority_of(fields: CommonFields) -> int:
    priority = fields.priority or 0
    if abs(priority) > MAX_PRIORITY:
        raise invalid(
            f"priority is {priority}; it must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, lower is sooner",
            "priority",
        )
    return priority


def check_token_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raises ApiError 400 for an id that the model does not have."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise invalid(f"{param} has the token id {wrong}; the model's ids go from 0 to {vocab_size - 1}", param)


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    for text in strings:
        if len(text) > MAX_STOP_CHARACTERS:
            raise invalid(
                f"stop has a string of {len(text)} characters; at most {MAX_STOP_CHARACTERS} are allowed", "stop"
            )
    return strings


def _stop_token_ids(token_ids: list[int], vocab_size: int) -> tuple[int, ...]:
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid(
            f"stop_token_ids has {len(token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed", "stop_token_ids"
        )
    check_token_ids(token_ids, vocab_size, "stop_token_ids")
    return tuple(token_ids)


def _logit_bias(biases: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(biases) > MAX_LOGIT_BIASES:
        raise invalid(f"logit_bias has {len(biases)} entries; at most {MAX_LOGIT_BIASES} are allowed", "logit_bias")
    pairs: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid(f"logit_bias has the key {key[:40]!r}; keys are token ids in decimal digits", "logit_bias")
        if int(key) in pairs:
            raise invalid(f"logit_bias names the token id {int(key)} twice", "logit_bias")
        pairs[int(key)] = bias
    check_token_ids(list(pairs), vocab_size, "logit_bias")
    return tuple(sorted(pairs.items()))
