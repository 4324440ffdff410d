"""Answers of /v1/completions. It does not know where the text comes from."""

from __future__ import annotations

from octavo.engine.outputs import GenerationDelta
from octavo.engine.tokenizer import Tokenizer
from octavo.server.answer import encode_json, event
from octavo.server.logprobs import completion_logprobs


class CompletionFormat:
    """`echoes`: the text that each choice starts with. What is the same in every chunk is encoded once."""

    def __init__(
        self, head: dict[str, object], echoes: list[str], tokenizer: Tokenizer, *, logprobs: bool, include_usage: bool
    ) -> None:
        self._head = {**head, "object": "text_completion"}
        self._echoes = list(echoes)
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        start = b"data: " + encode_json(self._head)[:-1] + b',"choices":[{"index":'
        self._prefixes = [start + str(index).encode() + b',"text":' for index in range(len(echoes))]
        self._end = b"}]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._plain_end = b',"logprobs":null,"finish_reason":null' + self._end

    def chunk(self, index: int, delta: GenerationDelta) -> bytes:
        text = delta.text
        if self._echoes[index]:
            text = self._echoes[index] + text
            self._echoes[index] = ""
        if delta.finish_reason is None and not self._logprobs:
            return self._prefixes[index] + encode_json(text) + self._plain_end if text else b""
        rest = encode_json({
            "logprobs": self._scores(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        })  # fmt: skip
        return self._prefixes[index] + encode_json(text) + b"," + rest[1:-1] + self._end

    def usage_chunk(self, usage: dict[str, object]) -> bytes:
        return event(encode_json({**self._head, "choices": [], "usage": usage}))

    def whole(self, choices: list[GenerationDelta], usage: dict[str, object]) -> dict[str, object]:
        written = [
            {
                "index": index,
                "text": self._echoes[index] + choice.text,
                "logprobs": self._scores(choice),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._head, "choices": written, "usage": usage}

    def _scores(self, delta: GenerationDelta) -> dict[str, list[object]] | None:
        return completion_logprobs(self._tokenizer, delta.scored_tokens) if self._logprobs else None
