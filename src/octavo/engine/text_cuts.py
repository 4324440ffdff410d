"""Where a text may be cut so that the tokens of its parts, one after the other, are the tokens of the whole.

A cut is safe by what stands around it, never by trial:
- in front of a special token, where no added token can reach across: the encoder takes such tokens out of a text first,
  from left to right, and everything between two of them by itself;
- where the way that text is cut before merging always has an edge (`_EDGE_OF_CUTS`), with no view behind it and none
  ahead but of the next character;
- without such a cut (SentencePiece), in front of a character that no token of the vocabulary has behind the one before:
  merging makes only tokens of the vocabulary, so nothing ever joins the two sides.
Whatever is not known (another model than BPE, another cut, another normalizer) is not cut. This file knows no cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from octavo.engine.token_spelling import SPACE_MARK

CHUNK_CHARACTERS = 256  # a cut that no special token makes comes after so many at the earliest

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_FULL_STOPS = "\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"  # CJK punctuation
# In every known cut no branch has: anything but white space, then a space; an ASCII letter or digit, then a line
# feed; a kana or CJK ideograph, then CJK punctuation. So a piece with the first of them ends there, whether the second
# follows or nothing. Python's white space holds that of the encoder.
_EDGE_OF_CUTS = re.compile(
    rf"(?<=\S)(?= )|(?<=[A-Za-z0-9])(?=\n)|(?<=[\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5])(?=[{_FULL_STOPS}])"
)
_SPACE_OR_FULL_STOP = re.compile(rf"(?<=[^\s{SPACE_MARK}])(?=[ {_FULL_STOPS}])")
_SPACE = re.compile(rf"(?<=[^\s{SPACE_MARK}])(?= )")


@dataclass(frozen=True, slots=True)
class _TextRule:
    """`places`: finds them; `never_after`: character -> those that it may not be cut off from.

    `letters`: characters that are tokens by themselves; where given, a cut comes behind one of them only.
    """

    places: re.Pattern[str]
    never_after: Mapping[str, frozenset[str]] = field(default_factory=dict)
    letters: frozenset[str] | None = None

    def find(self, text: str, start: int, end: int) -> int | None:
        """The first safe place from start on, before end."""
        for found in self.places.finditer(text, start, end):
            place = found.start()
            if place == end:
                return None
            before, refused = text[place - 1], self.never_after.get(text[place], frozenset())
            if before not in refused and (self.letters is None or before in self.letters):
                return place
        return None


class TextCuts:
    """The safe cuts of one encoder. Not for several threads at once."""

    def __init__(
        self, encoder: Tokenizer, known_splits: frozenset[str], chunk_characters: int = CHUNK_CHARACTERS
    ) -> None:
        """known_splits: regular expressions for which `_EDGE_OF_CUTS` holds."""
        self._encoder = encoder
        self._known_splits = known_splits
        self._chunk_characters = chunk_characters
        self._added = list(encoder.get_added_tokens_decoder().values())
        self._special = _cut_tokens(self._added)
        self._lengths = sorted({len(token) for token in self._special})
        firsts = "".join(sorted({re.escape(token[0]) for token in self._special}))
        self._first = re.compile(f"[{firsts}]") if firsts else None
        self._rule: _TextRule | None = None
        self._has_rule: bool | None = None  # None: not known yet; `prepare`

    def prepare(self) -> None:
        """Finds the rule by which texts are cut, which of a large vocabulary takes a fifth of a second.

        The first long text does it, if nobody did before.
        """
        if self._has_rule is None:
            self._rule = _text_rule(self._encoder, self._added, self._known_splits)
            self._has_rule = self._rule is not None

    def parts(self, text: str, *, parse_special: bool = True) -> Iterator[str]:
        """The text in parts to be encoded one by one. parse_special: special tokens in it are read as such."""
        start = 0
        for edge in (*(self._special_places(text) if parse_special else ()), len(text)):
            while edge - start > 2 * self._chunk_characters:
                place = self._text_place(text, start + self._chunk_characters, edge)
                if place is None:
                    break
                yield text[start:place]
                start = place
            if edge > start:
                yield text[start:edge]
                start = edge

    def _special_places(self, text: str) -> Iterator[int]:
        if self._first is None:
            return
        for found in self._first.finditer(text):
            place = found.start()
            if any(text[place : place + length] in self._special for length in self._lengths):
                yield place

    def _text_place(self, text: str, start: int, end: int) -> int | None:
        self.prepare()
        return None if self._rule is None else self._rule.find(text, start, end)


def _cut_tokens(added: list[AddedToken]) -> frozenset[str]:
    """Special tokens whose first character stands nowhere but first in any added token: nothing can reach across."""
    if any(token.single_word for token in added):  # what such a token is, depends on the characters around it
        return frozenset()
    inside = {letter for token in added for letter in token.content[1:]}
    # A token that takes white space before it, or is looked for in normalized text, makes its first character useless.
    spoiled = {token.content[0] for token in added if token.content and (token.lstrip or token.normalized)}
    return frozenset(
        token.content for token in added if token.special and token.content and token.content[0] not in inside | spoiled
    )


def _text_rule(encoder: Tokenizer, added: list[AddedToken], known_splits: frozenset[str]) -> _TextRule | None:
    model = encoder.model
    if (
        not isinstance(model, models.BPE)
        or model.dropout
        or model.continuing_subword_prefix
        or model.end_of_word_suffix
    ):
        return None
    if any(token.single_word or token.rstrip for token in added):  # they change, or take, what follows
        return None
    normalizers = _steps(encoder.normalizer, "normalizers")
    cuts = _steps(encoder.pre_tokenizer, "pretokenizers")
    rule = _rule_of_splits(normalizers, cuts, known_splits) or _rule_of_marks(encoder, normalizers, cuts)
    if rule is None or any(_holds_a_place(token, rule) for token in added):
        return None
    return rule


def _holds_a_place(token: AddedToken, rule: _TextRule) -> bool:
    """Whether a cut could fall into this token."""
    texts = {token.content, token.content.replace(SPACE_MARK, " ")} if token.normalized else {token.content}
    return any(0 < found.start() < len(text) for text in texts for found in rule.places.finditer(text))


def _rule_of_splits(
    normalizers: list[dict[str, Any]], cuts: list[dict[str, Any]], known_splits: frozenset[str]
) -> _TextRule | None:
    """Byte-level BPE behind one of the known cuts."""
    if any(step["type"] != "NFC" for step in normalizers):  # nothing is composed with a space or with punctuation
        return None
    has_edges = False
    for step in cuts:
        if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            has_edges |= step["use_regex"]
        elif step["type"] == "Split" and step["pattern"].get("Regex") in known_splits | {GPT2_SPLIT}:
            if step["behavior"] != "Isolated" or step["invert"]:
                return None
            has_edges = True
        elif step["type"] != "Digits":
            return None
    return _TextRule(_EDGE_OF_CUTS, {}) if has_edges else None


def _rule_of_marks(
    encoder: Tokenizer, normalizers: list[dict[str, Any]], cuts: list[dict[str, Any]]
) -> _TextRule | None:
    """SentencePiece's BPE over whole texts: spaces are marks, and few tokens have one behind something else."""
    if not normalizers and [step["type"] for step in cuts] == ["Metaspace"] and cuts[0]["replacement"] == SPACE_MARK:
        # A part that does not begin with a space may get one.
        places = _SPACE_OR_FULL_STOP if cuts[0]["prepend_scheme"] == "never" else _SPACE
    elif [step["type"] for step in normalizers] == ["Replace"] and _is_mark(normalizers[0]) and _finds_nothing(cuts):
        places = _SPACE_OR_FULL_STOP
    else:
        return None
    vocab = encoder.get_vocab(with_added_tokens=False)
    if SPACE_MARK not in vocab:
        return None
    # NUL between tokens: a pair that begins with it is none.
    pairs = set(re.findall(rf"(?s)(?=([^\0][{SPACE_MARK}{_FULL_STOPS}]))", "\0".join(vocab)))
    never_after = {
        " " if letter == SPACE_MARK else letter: frozenset(pair[0] for pair in pairs if pair[1] == letter)
        for letter in (SPACE_MARK, *_FULL_STOPS)
    }
    if any(letter not in vocab for letter in _FULL_STOPS):
        places = _SPACE
    # What is no token by itself becomes bytes or one unknown token, together with its like.
    return _TextRule(places, never_after, frozenset(token for token in vocab if len(token) == 1))


def _is_mark(step: dict[str, Any]) -> bool:
    return bool(step["pattern"] == {"String": " "} and step["content"] == SPACE_MARK)


def _finds_nothing(cuts: list[dict[str, Any]]) -> bool:
    """Gemma's files cut at spaces, of which there are none once they are marks."""
    return not cuts or [(step["type"], step.get("pattern")) for step in cuts] == [("Split", {"String": " "})]


def _steps(component: Any, name: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as the list of its steps, as tokenizer.json writes them."""
    if component is None:
        return []
    state: dict[str, Any] = json.loads(component.__getstate__())
    return list(state[name]) if state["type"] == "Sequence" else [state]
