"""Which bytes a token stands for: the spelling of byte-level BPE and of SentencePiece.

A vocabulary writes tokens as text, but a token is a string of bytes: a character may begin in one token and end in the
next. Everything that turns tokens back into text goes through these bytes. This file knows no vocabulary.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

SPACE_MARK = "\u2581"  # SentencePiece writes a space as this character
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class SpellingKind(Enum):
    BYTE_LEVEL = "byte level"  # each byte is one printable character (GPT-2's alphabet)
    SENTENCE_PIECE = "SentencePiece"  # text, with spaces as U+2581 and single bytes as <0xAB>


def byte_alphabet() -> dict[int, str]:
    """byte -> character of GPT-2's alphabet: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {byte: chr(byte) for byte in printable}
    letters.update({byte: chr(0x100 + index) for index, byte in enumerate(others)})
    return letters


@dataclass(frozen=True, slots=True)
class TokenSpelling:
    """How ordinary tokens are spelled, and whether decoded text loses one leading space."""

    kind: SpellingKind
    strips_leading_space: bool = False

    def letters(self) -> dict[str, int]:
        """character -> byte, empty where tokens are not written in the byte alphabet."""
        if self.kind is not SpellingKind.BYTE_LEVEL:
            return {}
        return {letter: byte for byte, letter in byte_alphabet().items()}


def spelled_bytes(token: str, letters: dict[str, int]) -> bytes:
    """The bytes of an ordinary token. `letters` is TokenSpelling.letters(), made once by the caller."""
    if letters:
        if all(letter in letters for letter in token):
            return bytes(letters[letter] for letter in token)
        return token.encode("utf-8")
    single = BYTE_TOKEN.fullmatch(token)
    if single is not None:
        return bytes([int(single.group(1), 16)])
    return token.replace(SPACE_MARK, " ").encode("utf-8")
