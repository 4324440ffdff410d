"""Answers of /v1/completions. It does not know where the text comes from."""

from __future__ import annotations

from octavo.engine.outputs import GenerationDelta
from octavo.engine.tokenizer import Tokenizer
from octavo.server.answer import choice_end, encode_json, event
from octavo.server.echo import Echo
from octavo.server.logprobs import completion_logprobs


class CompletionFormat:
    """`echoes`: one for each prompt, whose `num_answers` choices stand side by side.

    What is the same in every chunk is encoded once.
    """

    def __init__(
        self,
        head: dict[str, object],
        echoes: list[Echo],
        tokenizer: Tokenizer,
        *,
        num_answers: int,
        logprobs: bool,
        include_usage: bool,
    ) -> None:
        self._head = {**head, "object": "text_completion"}
        self._echoes = echoes
        self._num_answers = num_answers
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        num_choices = len(echoes) * num_answers
        self._begun = [False] * num_choices
        start = b"data: " + encode_json(self._head)[:-1] + b',"choices":[{"index":'
        self._prefixes = [start + str(index).encode() + b',"text":' for index in range(num_choices)]
        self._end = b"}]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._plain_end = b',"logprobs":null,"finish_reason":null' + self._end

    def chunk(self, index: int, delta: GenerationDelta) -> bytes:
        echo = self._echoes[index // self._num_answers]
        echo.take(delta.prompt_scores)
        if not delta.token_ids and delta.finish_reason is None:
            return b""  # scores of the prompt: they go out before the first token
        begins, self._begun[index] = not self._begun[index], True
        text = echo.text + delta.text if begins else delta.text
        if delta.finish_reason is None and not self._logprobs:
            return self._prefixes[index] + encode_json(text) + self._plain_end if text else b""
        rest = encode_json(choice_end(delta, self._scores(echo, delta, begins=begins)))
        return self._prefixes[index] + encode_json(text) + b"," + rest[1:-1] + self._end

    def usage_chunk(self, usage: dict[str, object]) -> bytes:
        return event(encode_json({**self._head, "choices": [], "usage": usage}))

    def whole(self, choices: list[GenerationDelta], usage: dict[str, object]) -> dict[str, object]:
        written = []
        for index, choice in enumerate(choices):
            echo = self._echoes[index // self._num_answers]
            echo.take(choice.prompt_scores)
            scores = self._scores(echo, choice, begins=True)
            written.append({"index": index, "text": echo.text + choice.text, **choice_end(choice, scores)})
        return {**self._head, "choices": written, "usage": usage}

    def _scores(self, echo: Echo, delta: GenerationDelta, *, begins: bool) -> dict[str, list[object]] | None:
        if not self._logprobs:
            return None
        answer = completion_logprobs(self._tokenizer, delta.scored_tokens, len(echo.text))
        if not (begins and echo.text):
            return answer
        return {name: [*values, *answer[name]] for name, values in echo.logprobs().items()}
