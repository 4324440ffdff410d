"""What `echo` puts before each answer to a prompt: the prompt's text, and how likely its tokens were.

It does not know who asked, nor how many answers there are.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.step import SampledToken
from octavo.engine.outputs import ScoredToken
from octavo.engine.tokenizer import Tokenizer
from octavo.server.logprobs import completion_logprobs
from octavo.server.prompts import Prompt


class Echo:
    """Of one prompt. Without an echo its text is empty and it has no scores."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer) -> None:
        self.text = prompt.text or ""
        self._token_ids = prompt.token_ids if prompt.text is not None else []
        self._tokenizer = tokenizer
        self._scores: list[SampledToken] = []  # of the prompt's tokens but the first, which follows nothing
        self._written: dict[str, list[object]] | None = None

    def take(self, scores: Sequence[SampledToken]) -> None:
        """The next ones; all are here before the first answer begins."""
        self._scores.extend(scores)

    def logprobs(self) -> dict[str, list[object]]:
        """The lists with which `logprobs` of each answer begins. The first token has no log-probability."""
        if self._written is None:
            scored = [SampledToken(token_id) for token_id in self._token_ids[:1]] + self._scores
            offsets = self._offsets()
            entries = [ScoredToken(token, offset) for token, offset in zip(scored, offsets, strict=False)]
            self._written = completion_logprobs(self._tokenizer, entries)
            for name in ("token_logprobs", "top_logprobs"):
                self._written[name][:1] = [None] * len(entries[:1])
        return self._written

    def _offsets(self) -> list[int]:
        """Characters of the text that are complete before each token."""
        detokenizer = self._tokenizer.new_detokenizer(())
        offsets, num_characters = [], 0
        for token_id in self._token_ids:
            offsets.append(num_characters)
            num_characters += len(detokenizer.push(token_id))
        return offsets
