"""Answers of /v1/chat/completions. It does not know where the text comes from."""

from __future__ import annotations

from octavo.engine.outputs import GenerationDelta
from octavo.engine.tokenizer import Tokenizer
from octavo.server.answer import encode_json, event
from octavo.server.logprobs import chat_logprobs


class ChatFormat:
    """One choice. What is the same in every chunk is encoded once."""

    def __init__(self, head: dict[str, object], tokenizer: Tokenizer, *, logprobs: bool, include_usage: bool) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        chunk_head = encode_json({**head, "object": "chat.completion.chunk"})[:-1]
        self._start = b"data: " + chunk_head + b',"choices":[{"index":0,"delta":'
        self._end = b"}]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._prefix = self._start + b'{"content":'
        self._plain_end = b'},"logprobs":null,"finish_reason":null' + self._end
        role = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        self._role_chunk = self._start + role + self._end  # sent once, before the first text

    def chunk(self, index: int, delta: GenerationDelta) -> bytes:
        assert index == 0, "a chat has one choice"
        role, self._role_chunk = self._role_chunk, b""
        if delta.finish_reason is None and not self._logprobs:
            return role + self._prefix + encode_json(delta.text) + self._plain_end if delta.text else role
        rest = encode_json({
            "logprobs": self._scores(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        })  # fmt: skip
        content = encode_json({"content": delta.text} if delta.text else {})
        return role + self._start + content + b"," + rest[1:-1] + self._end

    def usage_chunk(self, usage: dict[str, object]) -> bytes:
        return event(encode_json({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}))

    def whole(self, choices: list[GenerationDelta], usage: dict[str, object]) -> dict[str, object]:
        (choice,) = choices
        written = {
            "index": 0,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._scores(choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return {**self._head, "object": "chat.completion", "choices": [written], "usage": usage}

    def _scores(self, delta: GenerationDelta) -> dict[str, object] | None:
        return chat_logprobs(self._tokenizer, delta.scored_tokens) if self._logprobs else None
