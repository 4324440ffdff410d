"""A tokenizer from a model directory: tokenizer.json, tokenizer_config.json and special_tokens_map.json.

tokenizer.json says how text is cut and merged and is used as it is. The other two name the begin and end tokens, may
add tokens, and may say that a begin or end token is put around a text. A class name in them is not followed: octavo
runs no model's own code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from tokenizers import AddedToken, Tokenizer

from octavo.engine.gguf_tokenizer import KNOWN_SPLITS, set_surrounding
from octavo.engine.text_cuts import TextCuts
from octavo.engine.token_spelling import SpellingKind, TokenSpelling
from octavo.engine.tokenizer import TokenizerParts
from octavo.errors import ModelError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_directory(path: Path) -> TokenizerParts:
    """Raises ModelError when the directory has no tokenizer, or one that octavo does not know."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise _no_tokenizer(path)
    try:
        encoder = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises the bare Exception
        raise ModelError(f"{file} is broken ({error}); fetch it again") from error
    encoder.no_truncation()
    encoder.no_padding()
    settings = {**_read_object(path / "special_tokens_map.json"), **_read_object(path / "tokenizer_config.json")}
    _add_missing_tokens(encoder, settings)
    bos, eos = _named(encoder, settings, "bos_token"), _named(encoder, settings, "eos_token")
    if "add_bos_token" in settings or "add_eos_token" in settings:
        before = [bos] if bos is not None and settings.get("add_bos_token") else []
        after = [eos] if eos is not None and settings.get("add_eos_token") else []
        set_surrounding(encoder, before, after)
    return TokenizerParts(
        encoder,
        _spelling(file, json.loads(encoder.decoder.__getstate__()) if encoder.decoder else None),
        None if bos is None else bos[1],
        () if eos is None else (eos[1],),
        {name: text for name in NAMED_TOKENS if (text := _text_of(settings.get(name))) is not None},
        TextCuts(encoder, KNOWN_SPLITS),
    )


def _no_tokenizer(path: Path) -> ModelError:
    if (path / "tokenizer.model").is_file():
        return ModelError(
            f"{path} has a tokenizer.model but no tokenizer.json; make one with "
            f"`AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)` of transformers, or use the GGUF file"
        )
    return ModelError(f"{path} has no tokenizer.json; fetch the whole model, or use its GGUF file")


def _read_object(file: Path) -> dict[str, object]:
    """A JSON object, empty where the file is not there."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds no JSON object; fetch it again")
    return value


def _text_of(value: object) -> str | None:
    """A token is written as text, or as an object with its text in `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _named(encoder: Tokenizer, settings: Mapping[str, object], name: str) -> tuple[str, int] | None:
    text = _text_of(settings.get(name))
    token_id = None if text is None else encoder.token_to_id(text)
    return None if text is None or token_id is None else (text, token_id)


def _add_missing_tokens(encoder: Tokenizer, settings: Mapping[str, object]) -> None:
    """Tokens that only tokenizer_config.json or special_tokens_map.json knows, in the order of their ids."""
    present = {token.content for token in encoder.get_added_tokens_decoder().values()}
    listed = cast(Mapping[str, Mapping[str, object]], settings.get("added_tokens_decoder") or {})
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        text = _text_of(token)
        if text is None or text in present:
            continue
        present.add(text)
        options = {name: bool(token.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")}
        added = AddedToken(text, normalized=bool(token.get("normalized", not options["special"])), **options)
        encoder.add_special_tokens([added]) if options["special"] else encoder.add_tokens([added])
    more = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    named = [settings.get(name) for name in NAMED_TOKENS] + (list(more) if isinstance(more, list) else [])
    for text in dict.fromkeys(text for text in map(_text_of, named) if text is not None):
        if text not in present:
            encoder.add_special_tokens([AddedToken(text, normalized=False, special=True)])


def _spelling(file: Path, decoder: Mapping[str, object] | None) -> TokenSpelling:
    """What the decoder of tokenizer.json says about the bytes of a token."""
    steps = [decoder] if decoder is not None else []
    if decoder is not None and decoder.get("type") == "Sequence":
        steps = cast("list[Mapping[str, object]]", decoder["decoders"])
    kinds = [cast(str, step["type"]) for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenSpelling(SpellingKind.BYTE_LEVEL)
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return TokenSpelling(SpellingKind.SENTENCE_PIECE, strips_leading_space="Strip" in kinds)
    if kinds == ["Metaspace"]:
        never = steps[0].get("prepend_scheme") == "never"
        return TokenSpelling(SpellingKind.SENTENCE_PIECE, strips_leading_space=not never)
    raise ModelError(
        f"{file} has the decoder {'+'.join(kinds) or None}; octavo knows ByteLevel, Metaspace and SentencePiece's "
        f"Replace+ByteFallback+Fuse(+Strip). Use the model's GGUF file"
    )
