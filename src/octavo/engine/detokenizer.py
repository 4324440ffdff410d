"""Tokens in, text out, one token at a time: a character is sent whole or not at all.

Works on the bytes of tokens, so each push costs the length of its token and nothing else. A code point is never split;
an emoji of several code points may come in several pieces. It knows no vocabulary, no stop strings and no requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

LONGEST_UNFINISHED = 3  # bytes: a UTF-8 character has at most 4, so at most 3 of them can wait for the rest


class IncrementalDetokenizer:
    """Streams the text of the tokens that follow a prompt.

    All pushes and the flush together give what decoding prompt and tokens at once gives after the prompt's own text.
    `bytes_of` gives the bytes of a token, b"" for a token that is not shown. One owner, one request.
    """

    __slots__ = ("_bytes_of", "_decoder", "_strip_next")

    def __init__(
        self, bytes_of: Callable[[int], bytes], prompt_ids: Sequence[int] = (), *, strips_leading_space: bool = False
    ) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # The space is lost at the start of the whole text only, so not where the prompt has text of its own.
        self._strip_next = strips_leading_space and not any(bytes_of(token_id) for token_id in prompt_ids)
        self._decoder.decode(self._unfinished_of(prompt_ids))

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character waits for its other bytes."""
        return self._shown(self._decoder.decode(self._bytes_of(token_id)))

    def flush(self) -> str:
        """The end: what still waits is no character any more and comes as U+FFFD."""
        return self._shown(self._decoder.decode(b"", final=True))

    def _shown(self, text: str) -> str:
        if self._strip_next and text:
            self._strip_next = False
            return text.removeprefix(" ")
        return text

    def _unfinished_of(self, prompt_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes, as many as an unfinished character can have."""
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._bytes_of(token_id) + tail
            if len(tail) >= LONGEST_UNFINISHED:
                break
        return tail[-LONGEST_UNFINISHED:]
