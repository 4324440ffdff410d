"""Small traces written for the tests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def write_lines(path: Path, lines: list[Any], *, packed: bool = False) -> Path:
    """Each line as JSON, or as it is where it is a text."""
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


def mooncake(hash_ids: list[int], *, length: int | None = None, output: int = 5, time_ms: int = 0) -> dict[str, Any]:
    input_length = 512 * len(hash_ids) if length is None else length
    return {"timestamp": time_ms, "input_length": input_length, "output_length": output, "hash_ids": hash_ids}
