"""Log-probabilities in the two shapes of OpenAI's API. It does not know how they were computed."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.step import TokenLogprob
from octavo.engine.outputs import ScoredToken
from octavo.engine.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text; where its bytes are no whole characters, `bytes:\\xe2\\x82`."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[ScoredToken], num_characters_before: int = 0
) -> dict[str, list[object]]:
    """Parallel lists; `top_logprobs` holds the drawn token too, where it is not among the most likely.

    num_characters_before: of the text that stands before these tokens' own.
    """
    names: list[object] = []
    logprobs: list[object] = []
    tops: list[object] = []
    for scored in tokens:
        name, logprob = token_name(tokenizer, scored.sampled.token_id), _finite(scored.sampled.logprob)
        top: dict[str, float] = {}
        for candidate in scored.sampled.top_logprobs:
            top.setdefault(token_name(tokenizer, candidate.token_id), _finite(candidate.logprob))
        top.setdefault(name, logprob)
        names.append(name)
        logprobs.append(logprob)
        tops.append(top)
    offsets: list[object] = [num_characters_before + scored.text_offset for scored in tokens]
    return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[ScoredToken]) -> dict[str, object]:
    content = []
    for scored in tokens:
        entry = _chat_entry(tokenizer, scored.sampled.token_id, scored.sampled.logprob)
        entry["top_logprobs"] = [_top_entry(tokenizer, candidate) for candidate in scored.sampled.top_logprobs]
        content.append(entry)
    return {"content": content, "refusal": None}


def _top_entry(tokenizer: Tokenizer, candidate: TokenLogprob) -> dict[str, object]:
    return _chat_entry(tokenizer, candidate.token_id, candidate.logprob)


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> dict[str, object]:
    return {
        "token": token_name(tokenizer, token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _finite(logprob: float | None) -> float:
    return LOWEST if logprob is None else max(logprob, LOWEST)
