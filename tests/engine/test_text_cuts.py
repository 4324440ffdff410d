"""Cutting a text changes no token: every kind of tokenizer against encoding the whole, on texts hard to cut."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import tokenizers as tokenizers_library
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine import text_cuts
from octavo.engine.encoding_cache import EncodingCache
from octavo.engine.gguf_tokenizer import KNOWN_SPLITS, read_metadata
from octavo.engine.text_cuts import _FULL_STOPS, TextCuts
from octavo.engine.token_spelling import SpellingKind, TokenSpelling
from octavo.engine.tokenizer import Tokenizer, TokenizerParts
from octavo.errors import InvalidRequestError
from octavo.models.gguf_file import GgufFile
from tests.engine.encoder_kinds import CUT_INSIDE, KINDS, cut_by
from tests.engine.odd_text import HAND_WRITTEN, RANGES, odd_lines
from tests.engine.tiny_vocabularies import CORPUS, sentence_piece_metadata, sentence_piece_model

SPECIAL = (
    "<|begin|>",
    "<|end|>",
    "<|turn|>",
    "<think>",
    "<s>",
    "</s>",
    "<unk>",
    "<|x|>",
    "{y}",
    "<|x",
    "|><|",
    "y<",
    "<|end|> <",
    "b c",
    "<|im_start|>",
    "<|im_end|>\n",
    "<start_of_turn>user\n",
    "<0xE2>",
)
BETWEEN = (
    " ",
    "  ",
    "\n",
    "\n\n",
    " \n",
    "\r\n",
    "\t",
    "\u2581",
    "\u3000",
    "\xa0",
    "\u200b",
    "'s",
    "'",
    "\u3002",
    "\uff0c",
    ".",
)
WORDS = (
    "the",
    "there",
    "fox",
    "12",
    "2026",
    "e\u0301",
    "\u0301",
    "e\u0301 f",
    "b",
    "\u4f60\u597d",
    "\u30c6\u30ad\u30b9\u30c8",
    "Gr\xf6\xdfe",
    "\U0001f44d\U0001f3fd",
    "x",
)

# Where a token that begins as <|turn|> does reaches to its sides, or across it.
NOT_CUT_AT_TURNS = (
    "byte level, tokens that strip",
    "byte level, tokens between words",
    "byte level, overlapping tokens",
)

letters = st.sampled_from(RANGES).flatmap(lambda ends: st.integers(*ends)).map(chr)
pieces = st.one_of(
    st.sampled_from(SPECIAL), st.sampled_from(BETWEEN), st.sampled_from(WORDS), letters, st.sampled_from(HAND_WRITTEN)
)
texts = st.lists(pieces, max_size=14).map("".join)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tokenizer]]:
    """Of every kind, with parts as small as can be and larger ones."""
    found = {}
    for name, build in KINDS.items():
        parts = build(tmp_path_factory.mktemp("kind"))
        found[name] = [Tokenizer(cut_by(parts, size)) for size in (1, 4, 16)]
    return found


def assert_same(tokenizer: Tokenizer, text: str) -> None:
    for add_special_tokens in (True, False):
        for parse_special in (True, False):
            encode = functools.partial(tokenizer.encode, text, add_special_tokens, parse_special=parse_special)
            assert encode(namespace="n") == encode(), repr(text)


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, more=texts, place=st.integers(0, 100), length=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_a_text_that_grows_and_is_changed_in_the_middle(
    tokenizers: dict[str, list[Tokenizer]], kind: str, text: str, more: str, place: int, length: int
) -> None:
    """One after the other with the same memory, as a talk brings them."""
    changed = text[:place] + more + text[place + length :]
    for tokenizer in tokenizers[kind]:
        for one in (text, text + more, text + more + text, changed):
            assert_same(tokenizer, one)


@pytest.mark.parametrize("kind", KINDS)
def test_odd_lines_joined(tokenizers: dict[str, list[Tokenizer]], kind: str) -> None:
    lines = [*HAND_WRITTEN, *odd_lines(), *CORPUS]
    for between in ("", " ", "\n", "<|turn|>"):
        assert_same(tokenizers[kind][1], between.join(lines))


@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_is_all_that_is_encoded(tokenizers: dict[str, list[Tokenizer]], kind: str) -> None:
    """Where cuts inside of a text are known, nothing but its last parts; elsewhere from the last special token on."""
    tokenizer = tokenizers[kind][2]
    prose = "the quick brown fox jumps over the lazy dog, and there is nothing\nthat it will miss there. "
    history = f"<s><|turn|>{prose * 40}"
    tokenizer.encode(history, namespace="talk")
    before = tokenizer.encoding_counts
    tokenizer.encode(history + prose, namespace="talk")
    after = tokenizer.encoding_counts
    assert after.characters - before.characters == len(history + prose)
    encoded = after.encoded_characters - before.encoded_characters
    if kind in CUT_INSIDE:
        assert encoded < 2 * len(prose)
    else:
        assert encoded > len(prose) * 40


def test_a_new_turn_is_all_that_is_encoded_where_turns_begin_with_special_tokens(
    tokenizers: dict[str, list[Tokenizer]],
) -> None:
    cut_at_turns = 0
    for kind, (*_, tokenizer) in tokenizers.items():
        turn = "<|turn|>hello there"
        if len(tokenizer.encode("<|turn|>", add_special_tokens=False)) != 1:
            continue
        tokenizer.encode(turn * 100, namespace="turns")
        before = tokenizer.encoding_counts
        tokenizer.encode(turn * 100 + "<|turn|>other", namespace="turns")
        after = tokenizer.encoding_counts
        encoded = after.encoded_characters - before.encoded_characters
        if kind in NOT_CUT_AT_TURNS:
            assert encoded > len(turn) * 90, kind
        else:  # at the turn, or in the words of the turn before it
            assert encoded <= len(turn), kind
            cut_at_turns += 1
    assert cut_at_turns > 10


def test_the_real_tokenizer_of_smollm2(smollm2_path: Path) -> None:
    parts = read_metadata(GgufFile(smollm2_path).metadata)
    lines = [*HAND_WRITTEN, *odd_lines(), *CORPUS]
    for size in (1, 256):
        tokenizer = Tokenizer(cut_by(parts, size))
        for start in range(0, len(lines), 20):
            assert_same(tokenizer, "<|im_end|>\n<|im_start|>user\n".join(lines[start : start + 20]))
        assert_same(tokenizer, " ".join(lines))


def test_a_vocabulary_with_a_token_across_a_space_is_not_cut_there(tmp_path: Path) -> None:
    metadata = sentence_piece_metadata(sentence_piece_model(tmp_path))
    tokens, kinds, scores = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "scores"))
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    assert isinstance(scores, list)
    mark = "\u2581"
    tokens += [f"{mark}f", f"e{mark}", f"e{mark}f", f"the{mark}"]
    kinds += [1] * 4
    scores += [1.0] * 4
    tokenizer = Tokenizer(cut_by(read_metadata(metadata), 1))
    text = "the fox the foxes see fox the fog"
    assert any(" " in tokenizer.token_text(i)[1:] for i in tokenizer.encode(text))
    assert_same(tokenizer, text)
    assert_same(tokenizer, text * 3)


def test_half_a_surrogate_pair_is_found_in_the_whole_text(tokenizers: dict[str, list[Tokenizer]]) -> None:
    tokenizer = tokenizers["byte level, gpt-2"][0]
    with pytest.raises(InvalidRequestError, match=r"U\+D800\) at character 30"):
        tokenizer.encode("the <|turn|> fox " + " " * 13 + "\ud800 and more", namespace="n")
    assert_same(tokenizer, "the <|turn|> fox")


def test_the_rule_is_found_once_and_before_the_first_text_where_that_is_asked_for(
    tokenizers: dict[str, list[Tokenizer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    find = text_cuts._text_rule
    monkeypatch.setattr(text_cuts, "_text_rule", lambda *given: asked.append(given) or find(*given))
    encoder = tokenizers[next(iter(KINDS))][0]._encoder
    cuts = TextCuts(encoder, KNOWN_SPLITS, chunk_characters=10)
    cuts.prepare()
    assert len(asked) == 1
    assert "".join(cuts.parts("some words, and some more of them " * 4)) == "some words, and some more of them " * 4
    cuts.prepare()
    assert len(asked) == 1


def test_without_memory_all_is_encoded_again() -> None:
    parts = KINDS["byte level, gpt-2"](Path())
    tokenizer = Tokenizer(parts, EncodingCache(0))
    ids = [tokenizer.encode("the fox<|turn|>the dog", namespace="n") for _ in range(2)]
    assert ids[0] == ids[1]
    assert tokenizer.encoding_counts.encoded_characters == tokenizer.encoding_counts.characters


def small_sentence_piece(*tokens: str) -> Tokenizer:
    """Texts are one piece, as in SentencePiece; <unk> and a space may merge where the vocabulary has both as one."""
    vocab = {token: index for index, token in enumerate(("<unk>", *tokens))}
    merges = [("<unk>", "\u2581")] if "<unk>\u2581" in vocab else []
    encoder = tokenizers_library.Tokenizer(
        tokenizers_library.models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True)
    )
    encoder.pre_tokenizer = tokenizers_library.pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
    spelling = TokenSpelling(SpellingKind.SENTENCE_PIECE)
    return Tokenizer(TokenizerParts(encoder, spelling, None, (), {}, TextCuts(encoder, KNOWN_SPLITS, 1)))


def test_a_part_that_would_get_a_space_of_its_own_is_not_made() -> None:
    tokenizer = small_sentence_piece("\u2581", "a", "b", *_FULL_STOPS)
    assert_same(tokenizer, "ab\u3002ab\uff0cab")
    assert_same(tokenizer, "ab\u3002ab ab\u3002 ab")


def test_an_unknown_character_is_not_cut_off_from_what_its_token_merges_with() -> None:
    tokenizer = small_sentence_piece("\u2581", "a", "<unk>\u2581")
    assert tokenizer.encode("az a") == tokenizer.encode("az a", namespace="n")
    assert_same(tokenizer, "az az zz a")


def found_by(expression: str) -> set[str]:
    """The characters that the encoder's own regular expressions find, of all planes that have letters."""
    every = "".join(chr(code) for code in (*range(0xD800), *range(0xE000, 0x20000), *range(0xE0000, 0xE0200)))
    cut = tokenizers_library.pre_tokenizers.Split(tokenizers_library.Regex(expression), "removed", invert=True)
    return {letter for piece, _ in cut.pre_tokenize_str(every) for letter in piece}


def test_the_encoder_knows_letters_and_white_space_as_the_edges_do() -> None:
    spaces, letters_here = found_by(r"\s"), found_by(r"\p{L}")
    assert {" ", "\n", "\u3000"} <= spaces
    assert all(letter.isspace() for letter in spaces)
    behind = re.compile("[\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5A-Za-z]")
    assert {chr(code) for code in range(0x20000) if behind.match(chr(code))} <= letters_here
    assert not found_by(r"[\p{L}\p{N}\p{M}\s]") & set(_FULL_STOPS)
