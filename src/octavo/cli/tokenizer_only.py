"""The tokenizer of a model reference, without its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.cli.model_cache import resolve_model
from octavo.errors import ModelError

if TYPE_CHECKING:
    from octavo.engine.tokenizer import Tokenizer


def tokenizer_of(reference: str) -> Tokenizer:
    """A folder with tokenizer.json, a .gguf file, an alias or a hub id. Raises ModelError, DownloadError."""
    from octavo.engine.tokenizer import Tokenizer
    from octavo.models.gguf_file import GgufFile

    path = resolve_model(reference)
    if path.is_dir():
        return Tokenizer.from_directory(path)
    if path.suffix == ".gguf":
        return Tokenizer.from_gguf_metadata(GgufFile(path).metadata)
    raise ModelError(f"{reference} is neither a folder nor a .gguf file; give one that has a tokenizer")
