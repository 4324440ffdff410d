"""Text to token ids and back, for a model directory or the metadata of a GGUF file.

Encoding is the `tokenizers` library's, of the parts of a text that were not encoded before; decoding goes through the
bytes of tokens, so that streamed and whole text are the same. It does not know chat templates, sampling or the model's
own list of end tokens.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.encoding_cache import EncodingCache, Part
from octavo.engine.token_spelling import TokenSpelling, spelled_bytes
from octavo.errors import InvalidRequestError

if TYPE_CHECKING:
    import tokenizers

    from octavo.engine.text_cuts import TextCuts


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a reader of a directory or a GGUF file hands over: the encoder and what the file says beside it."""

    encoder: tokenizers.Tokenizer
    spelling: TokenSpelling
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]  # bos_token, eos_token ... -> text, as chat templates name them
    cuts: TextCuts


@dataclass(frozen=True, slots=True)
class EncodingCounts:
    """Since the tokenizer was made: the characters of all texts, and of the parts that were really encoded."""

    characters: int = 0
    encoded_characters: int = 0
    encoded_tokens: int = 0


class TokenizerPlace(Protocol):
    """Where a tokenizer is: exactly one of the two (`models.loader.TokenizerSource` is one)."""

    @property
    def directory(self) -> Path | None: ...
    @property
    def gguf_metadata(self) -> Mapping[str, object] | None: ...


class Tokenizer:
    """One model's tokenizer. Every method may be called from any thread."""

    def __init__(self, parts: TokenizerParts, cache: EncodingCache | None = None) -> None:
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self.special_tokens = dict(parts.special_tokens)
        self.spelling = parts.spelling
        self._encoder = parts.encoder
        # The library keeps "read special tokens in text" as a switch of the whole encoder, so encoding takes turns.
        self._encoding = threading.Lock()
        self._cuts = parts.cuts
        self._cache = EncodingCache() if cache is None else cache
        self._surrounding = _surrounding(parts.encoder)
        self._characters = self._encoded_characters = self._encoded_tokens = 0
        self._letters = parts.spelling.letters()
        self._bytes: dict[int, bytes] = {}
        added = parts.encoder.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self.special_token_ids = frozenset(self._special)
        self.vocab_size: int = parts.encoder.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """From tokenizer.json (with tokenizer_config.json and special_tokens_map.json), or from tokenizer.model.

        Raises ModelError when none is there, one is broken, or the kind is not known.
        """
        from octavo.engine.directory_tokenizer import read_directory

        return cls(read_directory(path))

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """From the `tokenizer.*` keys of a GGUF file. Raises ModelError for a kind or a pre-tokenizer not known."""
        from octavo.engine.gguf_tokenizer import read_metadata

        return cls(read_metadata(metadata))

    @classmethod
    def from_source(cls, source: TokenizerPlace) -> Tokenizer:
        """From where a model has it. Raises ModelError, as the other two."""
        if source.directory is not None:
            return cls.from_directory(source.directory)
        assert source.gguf_metadata is not None
        return cls.from_gguf_metadata(source.gguf_metadata)

    def write_directory(self, path: Path, chat_template: str | None = None) -> None:
        """tokenizer.json and tokenizer_config.json, from which `from_directory` makes the same tokenizer."""
        with self._encoding:
            self._encoder.encode_special_tokens = False
            self._encoder.save(str(path / "tokenizer.json"))
        settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        if chat_template is not None:
            settings["chat_template"] = chat_template
        (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")

    def prepare(self) -> None:
        """Does now what the first long text would wait for."""
        with self._encoding:
            self._cuts.prepare()

    def encode(
        self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True, namespace: str | None = None
    ) -> list[int]:
        """Token ids of a text.

        add_special_tokens: put the tokens around it that the model expects (a begin token, where it has one).
        parse_special: a special token written out in the text becomes that token; without it, it is plain text.
        namespace: parts of texts that came with the same one are not encoded again; None: encode the whole text, and
        keep nothing of it. The ids are the same.
        Raises InvalidRequestError for text that is not valid Unicode.
        """
        try:
            with self._encoding:
                self._encoder.encode_special_tokens = not parse_special
                if namespace is None or self._surrounding is None:
                    return self._encode_whole(text, add_special_tokens)
                ids: list[int] = []
                for part in self._cuts.parts(text, parse_special=parse_special):
                    ids.extend(self._encode_part(Part(namespace, parse_special, part)))
        except (UnicodeEncodeError, TypeError):
            place = next((index for index, letter in enumerate(text) if 0xD800 <= ord(letter) <= 0xDFFF), None)
            if place is None:
                raise
            raise InvalidRequestError(
                f"the text has half of a surrogate pair (U+{ord(text[place]):04X}) at character {place}, which is no "
                f"character; send valid Unicode"
            ) from None
        before, after = self._surrounding if add_special_tokens else ([], [])
        return [*before, *ids, *after] if before or after else ids

    @property
    def encoding_counts(self) -> EncodingCounts:
        return EncodingCounts(self._characters, self._encoded_characters, self._encoded_tokens)

    def _encode_whole(self, text: str, add_special_tokens: bool) -> list[int]:
        """Called with the lock held."""
        ids: list[int] = self._encoder.encode(text, add_special_tokens=add_special_tokens).ids
        self._characters += len(text)
        self._encoded_characters += len(text)
        self._encoded_tokens += len(ids)
        return ids

    def _encode_part(self, part: Part) -> array[int]:
        """Called with the lock held."""
        ids = self._cache.find(part)
        if ids is None:
            ids = array("I", self._encoder.encode(part.text, add_special_tokens=False).ids)
            self._cache.keep(part, ids)
            self._encoded_characters += len(part.text)
            self._encoded_tokens += len(ids)
        self._characters += len(part.text)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these tokens; bytes that are no UTF-8 come as U+FFFD, ids outside the vocabulary as nothing."""
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token_id) for token_id in ids if token_id not in hidden)
        text = data.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.spelling.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; b"" outside the vocabulary (models pad their logits)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._read_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """One token as text, for log probabilities: a part of a character comes as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it, or None."""
        found: int | None = self._encoder.token_to_id(token)
        return found

    def new_detokenizer(self, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """Streams the text of the tokens that will follow `prompt_ids`."""
        return IncrementalDetokenizer(
            self._visible_bytes if skip_special_tokens else self.token_bytes,
            prompt_ids,
            strips_leading_space=self.spelling.strips_leading_space,
        )

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self.special_token_ids else self.token_bytes(token_id)

    def _read_bytes(self, token_id: int) -> bytes:
        special = self._special.get(token_id)
        if special is not None:
            return special.encode("utf-8")
        token = self._encoder.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return b"" if token is None else spelled_bytes(token, self._letters)


def _surrounding(encoder: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """The ids that special tokens put before and after every text; None where they depend on the text."""
    text = "a"
    inner = encoder.encode(text, add_special_tokens=False).ids
    whole = encoder.encode(text, add_special_tokens=True).ids
    edges = [at for at in range(len(whole) - len(inner) + 1) if whole[at : at + len(inner)] == inner]
    if len(edges) != 1:
        return None
    before, after = whole[: edges[0]], whole[edges[0] + len(inner) :]
    return (before, after) if encoder.encode("", add_special_tokens=True).ids == before + after else None
