"""A tokenizer from the metadata of a GGUF file.

Two kinds: `gpt2` (byte-level BPE: the merges are in the file, the way text is cut before merging only by its name) and
`llama` (SentencePiece BPE: the merges follow from the vocabulary and its scores). A name that is not listed here is
refused: a wrong cut gives wrong tokens without a sign. Key names: the GGUF specification, `tokenizer.ggml.*`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from octavo.engine.text_cuts import TextCuts
from octavo.engine.token_spelling import SPACE_MARK, SpellingKind, TokenSpelling, byte_alphabet
from octavo.engine.tokenizer import TokenizerParts
from octavo.errors import ModelError

PREFIX = "tokenizer.ggml."
# Token types of the format; 1 is an ordinary token and 5 an unused one.
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
QWEN2_SPLIT = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

KNOWN_SPLITS = frozenset({LLAMA3_SPLIT, QWEN2_SPLIT, TEKKEN_SPLIT})

NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

# The names that a file may give in tokenizer.ggml.pre, by the way they cut.
GPT2_NAMES = frozenset({"gpt-2", "default"})
SMOLLM_NAMES = frozenset({"smollm"})
LLAMA3_NAMES = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3"})
QWEN2_NAMES = frozenset({"qwen2"})
TEKKEN_NAMES = frozenset({"tekken"})
WHOLE_WORD_NAMES = LLAMA3_NAMES | TEKKEN_NAMES  # a piece that is a token as a whole is taken without merging
BEGIN_NAMES = LLAMA3_NAMES | TEKKEN_NAMES  # the begin token comes first even where an older file has no flag for it
KNOWN_NAMES = GPT2_NAMES | SMOLLM_NAMES | LLAMA3_NAMES | QWEN2_NAMES | TEKKEN_NAMES

GEMMA_ARCHITECTURES = frozenset({"gemma", "gemma2", "gemma3"})


def read_metadata(metadata: Mapping[str, object]) -> TokenizerParts:
    """The tokenizer that these keys describe. Raises ModelError, naming key, value and cure."""
    kind = metadata.get(PREFIX + "model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"the GGUF file has the tokenizer kind {kind!r}; octavo reads 'gpt2' and 'llama'. "
            f"Use a directory with tokenizer.json for this model"
        )
    tokens = _strings(metadata, "tokens")
    types = _types(metadata, len(tokens))
    build = _byte_level if kind == "gpt2" else _sentence_piece
    encoder, spelling = build(metadata, tokens, types)
    bos = _token_id(metadata, "bos_token_id", len(tokens))
    ends = (_token_id(metadata, name, len(tokens)) for name in ("eos_token_id", "eot_token_id", "eom_token_id"))
    eos = tuple(dict.fromkeys(end for end in ends if end is not None))
    begins_by_default = kind == "llama" or metadata.get(PREFIX + "pre") in BEGIN_NAMES
    before = [bos] if bos is not None and _flag(metadata, "add_bos_token", begins_by_default) else []
    after = list(eos[:1]) if _flag(metadata, "add_eos_token", False) else []
    set_surrounding(encoder, [(tokens[i], i) for i in before], [(tokens[i], i) for i in after])
    named = {name: _token_id(metadata, key, len(tokens)) for name, key in NAMED_TOKENS.items()}
    special = {name: tokens[token_id] for name, token_id in named.items() if token_id is not None}
    return TokenizerParts(encoder, spelling, bos, eos, special, TextCuts(encoder, KNOWN_SPLITS))


def set_surrounding(encoder: Tokenizer, before: list[tuple[str, int]], after: list[tuple[str, int]]) -> None:
    """The tokens (text, id) that encoding with special tokens puts before and after a text."""
    pieces = [*(token_id for _, token_id in before), "$A", *(token_id for _, token_id in after)]
    # In a template a token is named by any word; its id is one that needs no quoting.
    names = [f"token_{piece}" if isinstance(piece, int) else piece for piece in pieces]
    special = [(f"token_{token_id}", token_id) for _, token_id in dict.fromkeys(before + after)]
    encoder.post_processor = processors.TemplateProcessing(single=names, special_tokens=special)


def _byte_level(metadata: Mapping[str, object], tokens: list[str], types: list[int]) -> tuple[Tokenizer, TokenSpelling]:
    name = metadata.get(PREFIX + "pre")
    if not isinstance(name, str) or name not in KNOWN_NAMES:
        raise ModelError(
            f"the GGUF file has the pre-tokenizer {name!r} (tokenizer.ggml.pre); octavo knows "
            f"{', '.join(sorted(KNOWN_NAMES))}. Use a directory with tokenizer.json for this model"
        )
    vocab = {token: token_id for token_id, token in enumerate(_respelled(tokens, types))}
    merges = _merges_of_file(metadata, vocab)
    encoder = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=name in WHOLE_WORD_NAMES))
    encoder.pre_tokenizer = _cut(name)
    encoder.decoder = decoders.ByteLevel()
    if name in QWEN2_NAMES:  # Qwen's tokenizers bring text into composed form first
        encoder.normalizer = normalizers.NFC()
    _add_whole_tokens(encoder, tokens, types)
    return encoder, TokenSpelling(SpellingKind.BYTE_LEVEL)


def _cut(name: str) -> pre_tokenizers.PreTokenizer:
    if name in GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in SMOLLM_NAMES:  # every digit stands alone, then GPT-2's cut
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    split = LLAMA3_SPLIT if name in LLAMA3_NAMES else QWEN2_SPLIT if name in QWEN2_NAMES else TEKKEN_SPLIT
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _respelled(tokens: list[str], types: list[int]) -> Iterator[str]:
    """Ordinary tokens in the byte alphabet (some files write them as text); whole tokens stay as they are."""
    letters = byte_alphabet()
    alphabet = frozenset(letters.values())
    whole = (CONTROL, USER_DEFINED)
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in whole or alphabet.issuperset(token):
            yield token
        else:
            yield "".join(letters[byte] for byte in token.encode("utf-8"))


def _merges_of_file(metadata: Mapping[str, object], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for line in _strings(metadata, "merges"):
        left, _, right = line.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(
                f"the GGUF file is broken: merge {len(merges)} of tokenizer.ggml.merges is {line[:80]!r}, which are "
                f"not two tokens that make a third one; fetch the file again"
            )
        merges.append((left, right))
    return merges


def _sentence_piece(
    metadata: Mapping[str, object], tokens: list[str], types: list[int]
) -> tuple[Tokenizer, TokenSpelling]:
    gemma = metadata.get("general.architecture") in GEMMA_ARCHITECTURES
    if gemma:  # its files write tokens of two or more spaces as spaces
        tokens = [
            SPACE_MARK * len(token) if token.startswith("  ") and not token.strip(" ") else token for token in tokens
        ]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if PREFIX + "merges" in metadata:
        merges = _merges_of_file(metadata, vocab)
    else:
        order = _order_of_ids(vocab) if gemma else _order_of_scores(metadata, vocab, len(tokens))
        merges = list(_merges_of_vocabulary(order, vocab, types))
    unknown = _token_id(metadata, "unknown_token_id", len(tokens))
    encoder = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix_space = not gemma and _flag(metadata, "add_space_prefix", True)
    if gemma:
        encoder.normalizer = normalizers.Replace(" ", SPACE_MARK)
        encoder.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    else:
        scheme = "first" if prefix_space else "never"
        encoder.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=scheme, split=False)
    _add_whole_tokens(encoder, tokens, types)
    return encoder, TokenSpelling(SpellingKind.SENTENCE_PIECE, strips_leading_space=prefix_space)


def _order_of_ids(vocab: Mapping[str, int]) -> list[str]:
    """Gemma's scores do not follow the order of its merges; the place in the vocabulary does."""
    return sorted(vocab, key=vocab.__getitem__)


def _order_of_scores(metadata: Mapping[str, object], vocab: Mapping[str, int], size: int) -> list[str]:
    scores = [float(cast(float, score)) for score in _array(metadata, "scores")]
    if len(scores) != size:
        raise ModelError(
            f"the GGUF file is broken: {len(scores)} tokenizer.ggml.scores for {size} tokens; fetch the file again"
        )
    return sorted(vocab, key=lambda token: -scores[vocab[token]])


def _merges_of_vocabulary(order: list[str], vocab: Mapping[str, int], types: list[int]) -> Iterator[tuple[str, str]]:
    """Every way to make a token of two others: best token first, then the longest left part.

    Tokens that stand for themselves (control, unknown, single bytes) are neither made nor used: user text must not be
    able to merge into one.
    """
    alone = {token for token, token_id in vocab.items() if types[token_id] in (UNKNOWN, CONTROL, BYTE)}
    pieces = vocab.keys() - alone
    for token in order:
        if token in alone:
            continue
        for cut in range(len(token) - 1, 0, -1):
            left = token[:cut]
            if left in pieces:
                right = token[cut:]
                if right in pieces:
                    yield left, right


def _add_whole_tokens(encoder: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Tokens that are found in text before it is cut: control tokens are special, user-defined ones are not."""
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    # Runs of U+2581 are spaces, which merging finds; a whole token would find the character itself only.
    defined = [t for t, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED and t.strip(SPACE_MARK)]
    encoder.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    encoder.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])


def _array(metadata: Mapping[str, object], name: str) -> Iterable[object]:
    value = metadata.get(PREFIX + name)
    if value is None or isinstance(value, str | bytes | int | float):
        raise ModelError(f"the GGUF file has no list {PREFIX}{name}, so it has no tokenizer; fetch or convert it again")
    return cast(Iterable[object], value)


def _strings(metadata: Mapping[str, object], name: str) -> list[str]:
    values = list(_array(metadata, name))
    if set(map(type, values)) != {str}:
        raise ModelError(f"the GGUF file is broken: {PREFIX}{name} is empty or holds something else than text")
    return cast(list[str], values)


def _types(metadata: Mapping[str, object], size: int) -> list[int]:
    if PREFIX + "token_type" not in metadata:
        return [1] * size
    types = [int(cast(int, value)) for value in _array(metadata, "token_type")]
    if len(types) != size:
        raise ModelError(f"the GGUF file is broken: {len(types)} {PREFIX}token_type for {size} tokens; fetch it again")
    return types


def _token_id(metadata: Mapping[str, object], name: str, size: int) -> int | None:
    value = metadata.get(PREFIX + name)
    if value is None:
        return None
    token_id = int(cast(int, value))
    if not 0 <= token_id < size:
        raise ModelError(f"the GGUF file is broken: {PREFIX}{name} is {token_id}, allowed is 0 to {size - 1}")
    return token_id


def _flag(metadata: Mapping[str, object], name: str, default: bool) -> bool:
    value = metadata.get(PREFIX + name)
    return default if value is None else bool(value)
