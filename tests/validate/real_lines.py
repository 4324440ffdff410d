"""Lines of the real data, that tokenizers are compared on."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

NUM_LINES = 5000
LONGEST = 4000  # characters


def text_lines(data: Path) -> list[str]:
    """NUM_LINES lines, as many from each file of text/ and chat/."""
    files = sorted(file for folder in ("text", "chat") for file in (data / folder).iterdir())
    each = [list(_strings_of(file)) for file in files]
    share = -(-NUM_LINES // len(each))
    taken = [lines[:: max(1, len(lines) // share)][:share] for lines in each]
    found = [line for lines in taken for line in lines]
    rest = (line for lines in each for line in lines[1 :: max(2, len(lines) // share)])
    while len(found) < NUM_LINES:
        found.append(next(rest))
    return found[:NUM_LINES]


def _strings_of(file: Path) -> Iterator[str]:
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    text = data.decode("utf-8", errors="replace")
    if ".json" not in file.name:
        yield from (line[:LONGEST] for line in text.splitlines(keepends=True) if line)
        return
    for value in [json.loads(text)] if ".json." in file.name else map(json.loads, text.splitlines()):
        yield from (string[:LONGEST] for string in _strings_in(value) if len(string) > 3)


def _strings_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _strings_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _strings_in(each)
