"""Tokenizers from directories, the bytes of tokens, and text that is no text."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequestError, ModelError
from octavo.models.gguf_file import GgufFile
from tests.engine.odd_text import HAND_WRITTEN, odd_lines
from tests.engine.reference_tokenizers import reference, smollm2_reference, write_gguf
from tests.engine.tiny_vocabularies import byte_level_metadata, sentence_piece_metadata, sentence_piece_model

LINES = [*HAND_WRITTEN, *odd_lines()]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer.from_gguf_metadata(byte_level_metadata("gpt-2"))


def saved(folder: Path, metadata: dict[str, object]) -> Path:
    """A directory as transformers saves it, from small GGUF metadata."""
    write_gguf(folder / "tiny.gguf", metadata)
    reference(folder, gguf_file="tiny.gguf").save_pretrained(folder / "saved")
    return folder / "saved"


def assert_same(ours: Tokenizer, theirs: Any) -> None:
    for line in LINES:
        assert ours.encode(line) == theirs.encode(line), repr(line)
        assert ours.encode(line, add_special_tokens=False) == theirs.encode(line, add_special_tokens=False)
        ids = ours.encode(line)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), repr(line)


def test_smollm2_as_a_directory(smollm2_path: Path, tmp_path: Path) -> None:
    smollm2_reference(smollm2_path).save_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    assert_same(ours, reference(tmp_path))
    from_gguf = Tokenizer.from_gguf_metadata(GgufFile(smollm2_path).metadata)
    assert all(ours.encode(line) == from_gguf.encode(line) for line in LINES)
    assert ours.special_token_ids == from_gguf.special_token_ids
    assert (ours.bos_token_id, ours.eos_token_ids) == (from_gguf.bos_token_id, from_gguf.eos_token_ids)


@pytest.mark.parametrize("add_bos_token", [True, False])
def test_a_begin_token_is_added_where_the_directory_says_so(add_bos_token: bool, tmp_path: Path) -> None:
    metadata = byte_level_metadata("gpt-2") | {"tokenizer.ggml.add_bos_token": add_bos_token}
    folder = saved(tmp_path, metadata)
    ours = Tokenizer.from_directory(folder)
    assert (ours.encode("hi")[0] == ours.bos_token_id) is add_bos_token
    assert_same(ours, reference(folder))


def test_sentencepiece_as_a_directory(tmp_path: Path) -> None:
    folder = saved(tmp_path, sentence_piece_metadata(sentence_piece_model(tmp_path)))
    ours = Tokenizer.from_directory(folder)
    assert ours.spelling.strips_leading_space
    assert_same(ours, reference(folder))


def test_tokens_that_only_the_config_knows_are_added(tmp_path: Path) -> None:
    folder = saved(tmp_path, byte_level_metadata("gpt-2"))
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["additional_special_tokens"] = ["<|extra|>"]
    config["eos_token"] = {"content": "<|turn|>"}
    file.write_text(json.dumps(config))
    ours = Tokenizer.from_directory(folder)
    assert len(ours.encode("<|extra|>")) == 1
    assert ours.encode("<|extra|>")[0] in ours.special_token_ids
    assert ours.eos_token_ids == (2,)
    assert ours.special_tokens["eos_token"] == "<|turn|>"


def test_a_directory_without_a_usable_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json; fetch the whole model"):
        Tokenizer.from_directory(tmp_path)
    sentence_piece_model(tmp_path).rename(tmp_path / "tokenizer.model")
    with pytest.raises(ModelError, match=r"tokenizer\.model but no tokenizer\.json; make one with"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match=r"tokenizer\.json is broken"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("text", ["[1, 2]", "{"])
def test_a_broken_config_is_named(text: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, byte_level_metadata("gpt-2"))
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        Tokenizer.from_directory(folder)


def test_an_unknown_decoder_is_refused_by_name(tmp_path: Path) -> None:
    folder = saved(tmp_path, byte_level_metadata("gpt-2"))
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    values["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    file.write_text(json.dumps(values))
    with pytest.raises(ModelError, match="decoder WordPiece"):
        Tokenizer.from_directory(folder)


def test_truncation_and_padding_in_the_file_are_not_ours(tmp_path: Path) -> None:
    folder = saved(tmp_path, byte_level_metadata("gpt-2"))
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    values["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(values))
    ours = Tokenizer.from_directory(folder)
    text = "the quick brown fox"
    assert ours.decode(ours.encode(text)) == text


def test_every_token_has_bytes_and_those_of_the_vocabulary_end_there(byte_level: Tokenizer) -> None:
    assert all(byte_level.token_bytes(i) for i in range(byte_level.vocab_size))
    assert byte_level.token_bytes(byte_level.vocab_size) == b""
    assert byte_level.token_bytes(-1) == b""
    assert byte_level.decode([byte_level.vocab_size + 7]) == ""


def test_special_tokens_are_shown_or_not(byte_level: Tokenizer) -> None:
    ids = [0, *byte_level.encode("hi"), 1]
    assert byte_level.decode(ids) == "hi"
    assert byte_level.decode(ids, skip_special_tokens=False) == "<|begin|>hi<|end|>"
    assert byte_level.token_text(0) == "<|begin|>"


def test_bytes_that_are_no_text_come_as_replacement(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("\U0001f44d")
    assert byte_level.decode(ids) == "\U0001f44d"
    assert byte_level.decode(ids[:-1] if len(ids) > 1 else ids) in ("\ufffd", "\U0001f44d")
    assert set("".join(byte_level.token_text(i) for i in byte_level.encode("\U0010fffd"))) == {"\ufffd"}


def test_half_a_surrogate_pair_is_a_fault_of_the_request(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=r"U\+D800\) at character 3"):
        byte_level.encode("abc\ud800")


def test_threads_do_not_see_each_others_switch(byte_level: Tokenizer) -> None:
    def encode(number: int) -> bool:
        return (2 in byte_level.encode("a <|turn|> b", parse_special=number % 2 == 0)) is (number % 2 == 0)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(encode, range(400)))


def test_a_directory_is_read_without_following_its_class_name(tmp_path: Path) -> None:
    folder = saved(tmp_path, byte_level_metadata("gpt-2"))
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
    }
    file.write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('the code of a model was run')")
    assert Tokenizer.from_directory(folder).encode("hi")
    shutil.rmtree(folder)
