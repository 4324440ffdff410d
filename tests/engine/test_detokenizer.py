"""Streamed text: whole characters, the same as decoding at once, and no work done twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.tokenizer import Tokenizer
from octavo.models.gguf_file import GgufFile
from tests.engine.odd_text import HAND_WRITTEN, odd_lines
from tests.engine.tiny_vocabularies import byte_level_metadata, sentence_piece_metadata, sentence_piece_model

# A vocabulary of single bytes: token i is the byte i, token 256 is hidden.
BYTES = [bytes([byte]) for byte in range(256)] + [b""]


def stream(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model")
    return Tokenizer.from_gguf_metadata(sentence_piece_metadata(sentence_piece_model(folder)))


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer.from_gguf_metadata(byte_level_metadata("gpt-2"))


def assert_stream_is_decode(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool) -> None:
    """The prompt's own stream, then the answer's: together what decoding all at once gives."""
    before = tokenizer.new_detokenizer([], skip)
    text = "".join(before.push(i) for i in prompt)
    text += "".join(stream(tokenizer.new_detokenizer(prompt, skip), ids))
    assert text == tokenizer.decode([*prompt, *ids], skip)


@pytest.mark.parametrize("line", [*HAND_WRITTEN, *odd_lines(count=40)])
def test_every_piece_is_whole_text(line: str, sentence_piece: Tokenizer, byte_level: Tokenizer) -> None:
    for tokenizer in (sentence_piece, byte_level):
        ids = tokenizer.encode(line)
        pieces = stream(tokenizer.new_detokenizer([]), ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        assert all("\ufffd" not in piece for piece in pieces)
        for cut in (1, len(ids) // 2):
            assert_stream_is_decode(tokenizer, ids[:cut], ids[cut:], True)


def test_smollm2_streams_what_it_encodes(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(GgufFile(smollm2_path).metadata)
    for line in HAND_WRITTEN:
        ids = tokenizer.encode(line)
        pieces = stream(tokenizer.new_detokenizer([1, 2]), ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        assert all("\ufffd" not in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 640), max_size=12), st.lists(st.integers(0, 640), max_size=24), st.booleans())
def test_any_tokens_at_all(prompt: list[int], ids: list[int], skip: bool) -> None:
    """Tokens of a model that writes nonsense: bytes out of order, special tokens anywhere, ids out of range."""
    assert_stream_is_decode(ANY_BYTE_LEVEL, prompt, ids, skip)


ANY_BYTE_LEVEL = Tokenizer.from_gguf_metadata(byte_level_metadata("gpt-2"))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_tokens_of_sentencepiece(data: st.DataObject, sentence_piece: Tokenizer) -> None:
    ids = st.lists(st.integers(0, sentence_piece.vocab_size), max_size=20)
    assert_stream_is_decode(sentence_piece, data.draw(ids), data.draw(ids), data.draw(st.booleans()))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(st.sampled_from([0x80, 0xBF, 0xC3, 0xE2, 0xF0, 0x9F, 0xFF, 256]), st.integers(0, 256)), max_size=20
    )
)
def test_bytes_in_any_order_are_decoded_as_at_once(ids: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(BYTES.__getitem__)
    expected = b"".join(BYTES[i] for i in ids).decode("utf-8", errors="replace")
    assert "".join(stream(detokenizer, ids)) == expected


def test_a_character_that_never_ends_comes_as_replacement_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(BYTES.__getitem__)
    assert [detokenizer.push(i) for i in b"a\xf0\x9f\x91"] == ["a", "", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_a_character_begun_in_the_prompt_is_ended_in_the_answer() -> None:
    prompt = list("x👍".encode())
    detokenizer = IncrementalDetokenizer(BYTES.__getitem__, prompt[:-1])
    assert detokenizer.push(prompt[-1]) == "👍"


def test_an_emoji_of_several_code_points_comes_in_code_points() -> None:
    family = "👩\u200d👩\u200d👧"
    pieces = stream(IncrementalDetokenizer(BYTES.__getitem__), list(family.encode()))
    assert [piece for piece in pieces if piece] == list(family)


def test_the_leading_space_is_lost_only_at_the_start_of_all_text(sentence_piece: Tokenizer) -> None:
    ids = sentence_piece.encode("the fox", add_special_tokens=False)
    assert sentence_piece.bos_token_id is not None
    bos = [sentence_piece.bos_token_id]
    assert "".join(stream(sentence_piece.new_detokenizer([]), ids)) == "the fox"
    assert "".join(stream(sentence_piece.new_detokenizer(bos), ids)) == "the fox"
    assert "".join(stream(sentence_piece.new_detokenizer(bos, skip_special_tokens=False), ids)) == " the fox"
    assert "".join(stream(sentence_piece.new_detokenizer(ids), ids)) == " the fox"


def test_a_push_reads_its_own_token_and_no_other() -> None:
    asked: list[int] = []

    def bytes_of(token_id: int) -> bytes:
        asked.append(token_id)
        return BYTES[token_id]

    detokenizer = IncrementalDetokenizer(bytes_of, [65] * 10_000)
    assert len(asked) <= 3
    asked.clear()
    for token_id in range(97, 123):
        detokenizer.push(token_id)
    assert asked == list(range(97, 123))


def test_a_long_prompt_of_text_is_not_read_for_its_leading_space() -> None:
    asked: list[int] = []

    def bytes_of(token_id: int) -> bytes:
        asked.append(token_id)
        return BYTES[token_id]

    IncrementalDetokenizer(bytes_of, [65] * 10_000, strips_leading_space=True)
    assert len(asked) <= 4
