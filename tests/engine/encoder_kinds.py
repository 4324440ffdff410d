"""One small tokenizer of every kind that octavo reads, and some that only a directory can bring."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from octavo.engine.directory_tokenizer import read_directory
from octavo.engine.gguf_tokenizer import KNOWN_NAMES, KNOWN_SPLITS, read_metadata, set_surrounding
from octavo.engine.text_cuts import TextCuts
from octavo.engine.token_spelling import SpellingKind, TokenSpelling
from octavo.engine.tokenizer import TokenizerParts
from tests.engine.tiny_vocabularies import CORPUS, byte_level_metadata, sentence_piece_metadata, sentence_piece_model

Build = Callable[[Path], TokenizerParts]
SENTENCE_PIECE = TokenSpelling(SpellingKind.SENTENCE_PIECE)


def cut_by(parts: TokenizerParts, chunk_characters: int) -> TokenizerParts:
    """The same encoder, with parts of another size."""
    return dataclasses.replace(parts, cuts=TextCuts(parts.encoder, KNOWN_SPLITS, chunk_characters))


def _parts(encoder: Tokenizer, spelling: TokenSpelling = SENTENCE_PIECE) -> TokenizerParts:
    return TokenizerParts(encoder, spelling, None, (), {}, TextCuts(encoder, KNOWN_SPLITS))


def _byte_level(name: str) -> Build:
    return lambda _: read_metadata(byte_level_metadata(name) | {"tokenizer.ggml.add_bos_token": True})


def _sentence_piece(architecture: str, **flags: object) -> Build:
    more = {f"tokenizer.ggml.{name}": value for name, value in flags.items()}
    return lambda folder: read_metadata(sentence_piece_metadata(sentence_piece_model(folder), architecture) | more)


def _of_directory(folder: Path) -> TokenizerParts:
    encoder = read_metadata(byte_level_metadata("llama-bpe")).encoder
    encoder.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|begin|>", "add_bos_token": true}')
    return read_directory(folder)


def _whole_segments(_: Path) -> TokenizerParts:
    """Bytes are merged over a whole text: nothing but a special token is a safe cut."""
    encoder = read_metadata(byte_level_metadata("gpt-2")).encoder
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _parts(encoder, TokenSpelling(SpellingKind.BYTE_LEVEL))


def _prepending(folder: Path) -> TokenizerParts:
    """As older files of Llama have it: a space before whatever stands between two special tokens."""
    encoder = _sentence_piece("llama")(folder).encoder
    encoder.pre_tokenizer = None  # type: ignore[assignment]
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return _parts(encoder)


def _metaspace(scheme: str) -> Build:
    def build(folder: Path) -> TokenizerParts:
        encoder = _sentence_piece("llama")(folder).encoder
        encoder.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme=scheme, split=False)
        return _parts(encoder)

    return build


def _tokens_with_sides(**flags: bool) -> Build:
    """Special tokens that take white space beside them, or are read between words only."""

    def build(_: Path) -> TokenizerParts:
        encoder = read_metadata(byte_level_metadata("qwen2")).encoder
        encoder.add_special_tokens(
            [AddedToken(text, normalized=False, special=True, **flags) for text in ("<|x|>", "{y}")]
        )
        return _parts(encoder, TokenSpelling(SpellingKind.BYTE_LEVEL))

    return build


def _overlapping_tokens(_: Path) -> TokenizerParts:
    """Added tokens that begin inside others, hold spaces and line ends, or are looked for in normalized text."""
    encoder = read_metadata(byte_level_metadata("qwen2")).encoder
    encoder.add_special_tokens(
        [AddedToken(text, normalized=False) for text in ("<|x", "|><|", "|>", "y<", "<|end|> <")]
    )
    encoder.add_tokens([AddedToken("b c", normalized=False), AddedToken("e\u0301 f", normalized=True)])
    return _parts(encoder, TokenSpelling(SpellingKind.BYTE_LEVEL))


def _unigram(_: Path) -> TokenizerParts:
    encoder = Tokenizer(models.Unigram())
    encoder.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="always", split=False)
    encoder.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>", "<|turn|>"]
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=special, unk_token="<unk>", show_progress=False)
    encoder.train_from_iterator(CORPUS, trainer)
    set_surrounding(encoder, [("<s>", 1)], [("</s>", 2)])
    return _parts(encoder)


# name -> how to make it
KINDS: dict[str, Build] = {
    **{f"byte level, {name}": _byte_level(name) for name in sorted(KNOWN_NAMES)},
    "byte level, directory": _of_directory,
    "byte level, whole segments": _whole_segments,
    "byte level, tokens that strip": _tokens_with_sides(lstrip=True, rstrip=True),
    "byte level, tokens that strip left": _tokens_with_sides(lstrip=True),
    "byte level, tokens that strip right": _tokens_with_sides(rstrip=True),
    "byte level, tokens between words": _tokens_with_sides(single_word=True),
    "byte level, overlapping tokens": _overlapping_tokens,
    "SentencePiece, llama": _sentence_piece("llama"),
    "SentencePiece, llama without a prefix": _sentence_piece("llama", add_space_prefix=False),
    "SentencePiece, with an end token": _sentence_piece("llama", add_eos_token=True),
    "SentencePiece, gemma": _sentence_piece("gemma3"),
    "SentencePiece, prepending": _prepending,
    "SentencePiece, metaspace always": _metaspace("always"),
    "Unigram": _unigram,
}
# What is cut inside a text too, not only at special tokens.
CUT_INSIDE = frozenset(
    name
    for name in KINDS
    if name
    not in ("byte level, whole segments", "byte level, overlapping tokens", "SentencePiece, prepending", "Unigram")
    and not name.endswith(("that strip", "strip right", "between words"))
)
