"""Reads the small JSON files of a model directory: bounded, and with one clear error for whatever is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from octavo.errors import ModelError

MAX_JSON_BYTES = 16 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; ModelError where there is none."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw = file.read(min(size, MAX_JSON_BYTES) + 1)  # read() allocates what it is asked for
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from error
    return parse_json(raw, str(path))


def parse_json(raw: bytes, where: str) -> dict[str, Any]:
    """The object in `raw`, which `where` names in errors."""
    if len(raw) > MAX_JSON_BYTES:
        raise ModelError(f"{where} has more than {MAX_JSON_BYTES} bytes, the most that is read; download it again")
    try:
        value = json.loads(raw, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{where} holds a JSON {type(value).__name__} where an object is expected; download it again")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} stands twice in one object")
    return found
