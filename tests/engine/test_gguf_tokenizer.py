"""Token ids from GGUF metadata against transformers, SentencePiece and what the model families' own files say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from octavo.engine.gguf_tokenizer import KNOWN_NAMES, QWEN2_SPLIT
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ModelError
from octavo.models.gguf_file import GgufFile
from tests.engine.odd_text import HAND_WRITTEN, odd_lines
from tests.engine.reference_tokenizers import reference, smollm2_reference, write_gguf
from tests.engine.tiny_vocabularies import byte_level_metadata, sentence_piece_metadata, sentence_piece_model

LINES = [*HAND_WRITTEN, *odd_lines()]


def assert_same_ids(ours: Tokenizer, theirs: Any, lines: list[str] = LINES) -> None:
    for add_special_tokens in (True, False):
        for line in lines:
            expected = theirs.encode(line, add_special_tokens=add_special_tokens)
            assert ours.encode(line, add_special_tokens=add_special_tokens) == expected, repr(line)


def test_smollm2_gives_the_ids_of_transformers(smollm2_path: Path) -> None:
    ours = Tokenizer.from_gguf_metadata(GgufFile(smollm2_path).metadata)
    theirs = smollm2_reference(smollm2_path)
    assert_same_ids(ours, theirs)
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_ids) == (len(theirs), 1, (2,))
    assert ours.special_token_ids == frozenset(i for i, token in theirs.added_tokens_decoder.items() if token.special)
    assert ours.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    for line in LINES:
        ids = ours.encode(line)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_smollm2_takes_every_digit_alone(smollm2_path: Path) -> None:
    ours = Tokenizer.from_gguf_metadata(GgufFile(smollm2_path).metadata)
    assert [ours.token_text(i) for i in ours.encode("a\n\n12  3")] == ["a", "\n\n", "1", "2", "  ", "3"]


@pytest.mark.parametrize("pre", sorted(KNOWN_NAMES))
def test_byte_level_cut_is_that_of_transformers(pre: str, tmp_path: Path) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    split = GGUF_PRE_TOKENIZER_SPLITS.get(pre)
    metadata = byte_level_metadata(pre, split)
    metadata["tokenizer.ggml.add_bos_token"] = True
    write_gguf(tmp_path / "tiny.gguf", metadata)
    theirs = reference(tmp_path, gguf_file="tiny.gguf")
    backend = theirs.backend_tokenizer
    # What the families' own tokenizer.json has and a GGUF file's reading in transformers leaves out.
    if pre == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    if pre in ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"):
        backend.model.ignore_merges = True
    assert_same_ids(Tokenizer.from_gguf_metadata(metadata), theirs)


def test_qwen2_is_that_of_its_own_class() -> None:
    from transformers import Qwen2Tokenizer

    metadata = byte_level_metadata("qwen2", QWEN2_SPLIT)
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    theirs = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
        eos_token="<|end|>",
        pad_token="<|begin|>",
        unk_token="<|turn|>",
    )
    theirs.add_tokens(["<think>"])
    assert_same_ids(Tokenizer.from_gguf_metadata(metadata), theirs)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken"])
def test_cuts_are_regular_expressions_that_find_every_character(pre: str) -> None:
    """A character that no branch of the cut takes would still be kept: Split isolates what is between matches."""
    from octavo.engine import gguf_tokenizer as here

    split = {"llama-bpe": here.LLAMA3_SPLIT, "qwen2": here.QWEN2_SPLIT, "tekken": here.TEKKEN_SPLIT}[pre]
    for line in LINES:
        pieces = pre_tokenizers.Split(Regex(split), "isolated").pre_tokenize_str(line)
        assert "".join(piece for piece, _ in pieces) == line


def test_llama_type_gives_the_ids_of_transformers_and_sentencepiece(tmp_path: Path) -> None:
    import sentencepiece

    model = sentence_piece_model(tmp_path)
    metadata = sentence_piece_metadata(model)
    write_gguf(tmp_path / "tiny.gguf", metadata)
    ours = Tokenizer.from_gguf_metadata(metadata)
    assert_same_ids(ours, reference(tmp_path, gguf_file="tiny.gguf"))
    original = sentencepiece.SentencePieceProcessor(model_file=str(model))
    plain = [line for line in HAND_WRITTEN if line and not line.startswith((" ", "\u2581")) and "<" not in line]
    assert len(plain) > 20
    for line in plain:
        assert ours.encode(line, add_special_tokens=False) == original.encode(line), repr(line)
        assert ours.decode(ours.encode(line)) == line


@pytest.mark.parametrize("flag", [True, False])
def test_prefix_space_follows_the_file(flag: bool, tmp_path: Path) -> None:
    metadata = sentence_piece_metadata(sentence_piece_model(tmp_path)) | {"tokenizer.ggml.add_space_prefix": flag}
    ours = Tokenizer.from_gguf_metadata(metadata)
    assert ours.token_text(ours.encode("the", add_special_tokens=False)[0]).startswith(" ") is flag
    assert ours.decode(ours.encode("the fox")) == "the fox"
    assert ours.decode(ours.encode(" the fox")) == " the fox"[flag:]


def test_gemma_type_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    metadata = sentence_piece_metadata(sentence_piece_model(tmp_path), "gemma3")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = metadata["tokenizer.ggml.scores"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    assert isinstance(scores, list)
    position = kinds.index(1)  # Gemma's files write runs of spaces as spaces, as user-defined tokens
    tokens[position:position] = ["\n\n", "  ", "   "]
    kinds[position:position] = [4, 4, 4]
    scores[position:position] = [-1000.0] * 3
    tokens[:] = [
        token if token not in ("\u2581\u2581", "\u2581\u2581\u2581") else f"<pad{i}>" for i, token in enumerate(tokens)
    ]
    write_gguf(tmp_path / "tiny.gguf", metadata)
    ours = Tokenizer.from_gguf_metadata(metadata)
    assert_same_ids(ours, reference(tmp_path, gguf_file="tiny.gguf"))
    assert "  " in [ours.token_text(i) for i in ours.encode("a  b")]
    assert ours.decode(ours.encode("  a  b\n\nc ")) == "  a  b\n\nc "


def test_text_cannot_be_merged_into_a_control_token(tmp_path: Path) -> None:
    metadata = sentence_piece_metadata(sentence_piece_model(tmp_path))
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    tokens[-2:], kinds[-2:] = ["</", "s>"], [1, 1]
    ours = Tokenizer.from_gguf_metadata(metadata)
    end = ours.eos_token_ids[0]
    assert end in ours.encode("a</s>")
    assert end not in ours.encode("a</s>", parse_special=False)
    assert ours.decode(ours.encode("a</s>", parse_special=False)) == "a</s>"


def test_special_tokens_in_text_are_read_or_not() -> None:
    ours = Tokenizer.from_gguf_metadata(byte_level_metadata("gpt-2"))
    assert ours.eos_token_ids == (1, 2)
    assert ours.encode("<|turn|>a")[0] == 2
    plain = ours.encode("<|turn|>a<think>", parse_special=False)
    assert 2 not in plain
    assert plain[-1] == ours.token_id("<think>")  # a user-defined token is no special one
    assert ours.decode(plain) == "<|turn|>a<think>"
    assert ours.encode("<|turn|>a")[0] == 2  # the switch does not stay


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "kind 'rwkv'"),
        ({"tokenizer.ggml.model": None}, "kind None"),
        ({"tokenizer.ggml.pre": "qwen35"}, "pre-tokenizer 'qwen35'"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer None"),
        ({"tokenizer.ggml.tokens": None}, "no list tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": []}, "is empty"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "something else than text"),
        ({"tokenizer.ggml.token_type": [1]}, "1 tokenizer.ggml.token_type for"),
        ({"tokenizer.ggml.merges": ["zz"]}, "merge 0"),
        ({"tokenizer.ggml.merges": None}, "no list tokenizer.ggml.merges"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id is 1000000"),
    ],
)
def test_a_broken_or_unknown_file_is_refused_by_name(changes: dict[str, object], said: str) -> None:
    metadata = byte_level_metadata("gpt-2") | changes
    with pytest.raises(ModelError, match=said):
        Tokenizer.from_gguf_metadata({key: value for key, value in metadata.items() if value is not None})


def test_scores_must_be_as_many_as_tokens(tmp_path: Path) -> None:
    metadata = sentence_piece_metadata(sentence_piece_model(tmp_path)) | {"tokenizer.ggml.scores": [0.0]}
    with pytest.raises(ModelError, match=r"1 tokenizer\.ggml\.scores for"):
        Tokenizer.from_gguf_metadata(metadata)
