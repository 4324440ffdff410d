"""Answers of /v1/chat/completions. It does not know where the text comes from."""

from __future__ import annotations

from octavo.engine.outputs import GenerationDelta
from octavo.engine.tokenizer import Tokenizer
from octavo.server.answer import choice_end, encode_json, event
from octavo.server.logprobs import chat_logprobs


class ChatFormat:
    """One chat with `num_answers` choices. What is the same in every chunk is encoded once."""

    def __init__(
        self, head: dict[str, object], tokenizer: Tokenizer, *, num_answers: int, logprobs: bool, include_usage: bool
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        chunk_head = (
            b"data: " + encode_json({**head, "object": "chat.completion.chunk"})[:-1] + b',"choices":[{"index":'
        )
        self._starts = [chunk_head + str(index).encode() + b',"delta":' for index in range(num_answers)]
        self._end = b"}]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._prefixes = [one + b'{"content":' for one in self._starts]
        self._plain_end = b'},"logprobs":null,"finish_reason":null' + self._end
        role = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        self._role_chunks = [one + role + self._end for one in self._starts]  # sent once, before the first text

    def chunk(self, index: int, delta: GenerationDelta) -> bytes:
        role, self._role_chunks[index] = self._role_chunks[index], b""
        if delta.finish_reason is None and not self._logprobs:
            return role + self._prefixes[index] + encode_json(delta.text) + self._plain_end if delta.text else role
        rest = encode_json(choice_end(delta, self._scores(delta)))
        content = encode_json({"content": delta.text} if delta.text else {})
        return role + self._starts[index] + content + b"," + rest[1:-1] + self._end

    def usage_chunk(self, usage: dict[str, object]) -> bytes:
        return event(encode_json({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}))

    def whole(self, choices: list[GenerationDelta], usage: dict[str, object]) -> dict[str, object]:
        written = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                **choice_end(choice, self._scores(choice)),
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._head, "object": "chat.completion", "choices": written, "usage": usage}

    def _scores(self, delta: GenerationDelta) -> dict[str, object] | None:
        return chat_logprobs(self._tokenizer, delta.scored_tokens) if self._logprobs else None
