"""What a model's files say about generating with it: end tokens, advice on sampling, chat templates. No tokenizer."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequestError, ModelError
from octavo.models.json_file import read_json

_MAX_TEMPLATE_BYTES = 1 << 20
_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_GGUF_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GGUF_TEMPLATE = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """None or empty: the model's files say nothing."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)  # field of SamplingParams -> the model's own advice
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # name -> Jinja source; "default" is the usual one

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")


def generation_from_directory(directory: Path, config: Mapping[str, Any], vocab_size: int) -> GenerationDefaults:
    """From generation_config.json, where it is silent from config.json, and from the template files."""
    path = directory / "generation_config.json"
    said = read_json(path) if path.exists() else {}
    end = said.get("eos_token_id") if said.get("eos_token_id") is not None else config.get("eos_token_id")
    begin = said.get("bos_token_id") if said.get("bos_token_id") is not None else config.get("bos_token_id")
    return GenerationDefaults(
        eos_token_ids=_token_ids(end, "eos_token_id", vocab_size),
        bos_token_id=next(iter(_token_ids(begin, "bos_token_id", vocab_size)), None),
        sampling=_sampling(said, path),
        chat_templates=_templates_of_directory(directory),
    )


def generation_from_gguf(metadata: Mapping[str, Any], vocab_size: int) -> GenerationDefaults:
    ends: list[int] = []
    for key in _GGUF_END_KEYS:
        ends += _token_ids(metadata.get(f"tokenizer.ggml.{key}"), key, vocab_size)
    begin = _token_ids(metadata.get("tokenizer.ggml.bos_token_id"), "bos_token_id", vocab_size)
    templates = {}
    for key, value in metadata.items():
        if key == _GGUF_TEMPLATE or key.startswith(_GGUF_TEMPLATE + "."):
            name = key[len(_GGUF_TEMPLATE) + 1 :] or "default"
            templates[name] = _template(value, f"GGUF metadata {key}")
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(ends)), bos_token_id=next(iter(begin), None), chat_templates=templates
    )


def _token_ids(value: object, name: str, vocab_size: int) -> tuple[int, ...]:
    """One id or a list of them; ids that the model cannot produce are left out."""
    if value is None:
        return ()
    ids: list[Any] = value if isinstance(value, list) else [value]
    for item in ids:
        if type(item) is not int:
            raise ModelError(f"{name} is {reprlib.repr(value)}; it must be a token id or a list of them")
    return tuple(dict.fromkeys(item for item in ids if 0 <= item < vocab_size))


def _sampling(said: Mapping[str, Any], path: Path) -> dict[str, float]:
    """The fields that are said, known to be in range."""
    found = {name: said[name] for name in _SAMPLING_FIELDS if said.get(name) is not None}
    for name, value in found.items():
        if type(value) is not int and (name == "top_k" or type(value) is not float):
            raise ModelError(f"{path}: {name} is {reprlib.repr(value)}; it must be a number")
    try:
        SamplingParams(**found)
    except InvalidRequestError as error:
        raise ModelError(f"{path}: {error}") from error
    return found


def _templates_of_directory(directory: Path) -> dict[str, str]:
    """tokenizer_config.json (one template, or a list of named ones), then files, which win."""
    templates: dict[str, str] = {}
    path = directory / "tokenizer_config.json"
    said = read_json(path).get("chat_template") if path.exists() else None
    if isinstance(said, list):
        for entry in said:
            if not (isinstance(entry, dict) and isinstance(entry.get("name"), str)):
                raise ModelError(f"{path}: a chat template of the list has no name")
            templates[entry["name"]] = _template(entry.get("template"), str(path))
    elif said is not None:
        templates["default"] = _template(said, str(path))
    for file in [directory / "chat_template.jinja", *sorted(directory.glob("additional_chat_templates/*.jinja"))]:
        if file.is_file():
            name = "default" if file.parent == directory else file.stem
            templates[name] = _template(_text_of(file), str(file))
    return templates


def _text_of(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return stream.read(_MAX_TEMPLATE_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read as text ({error}); download it again") from error


def _template(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ModelError(f"{where}: the chat template is a {type(value).__name__}; it must be text")
    if len(value) > _MAX_TEMPLATE_BYTES:
        raise ModelError(
            f"{where}: the chat template has {len(value)} characters; at most {_MAX_TEMPLATE_BYTES} are read"
        )
    return value
