"""Small vocabularies trained on a few lines, in the form of a GGUF file's metadata."""

from __future__ import annotations

import io
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from tests.engine.odd_text import HAND_WRITTEN

CORPUS = [
    *HAND_WRITTEN[4:20],
    "the quick brown fox jumps over the lazy dog while the other foxes watch it from the hill",
    "there is nothing there that they have not seen there before, and nothing that they will miss",
    "In 1984 and 2001 there were 12 or 13 of them; in 2026 there are 1000.",
]


def byte_level_metadata(pre: str, split: str | None = None, size: int = 500) -> dict[str, object]:
    """A gpt2-type vocabulary whose merges were learned with this cut (GPT-2's own without one)."""
    trained = Tokenizer(models.BPE())
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    trained.pre_tokenizer = (
        cut if split is None else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), cut])
    )
    special = ["<|begin|>", "<|end|>", "<|turn|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(CORPUS * 3, trainer)
    vocab = trained.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    import json

    merges = [" ".join(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    tokens.append("<think>")
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in special else 4 if t == "<think>" else 1 for t in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
    }


def sentence_piece_model(folder: Path) -> Path:
    """A SentencePiece BPE model file with byte fallback, as Llama's is made.

    In a folder of its own: transformers prefers a tokenizer.model to a GGUF file beside it.
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=650,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        character_coverage=0.98,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    file = folder / "original" / "tokenizer.model"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(model.getvalue())
    return file


def sentence_piece_metadata(file: Path, architecture: str = "llama") -> dict[str, object]:
    """A llama-type vocabulary: pieces, scores and kinds of a SentencePiece model."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    ids = range(model.get_piece_size())
    kinds = [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in ids]
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [float(model.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }
