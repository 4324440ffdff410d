"""Lengths of real requests from a file: CSV (also gzipped) with columns of prompt and output tokens, or plain numbers.

It does not know models.
"""

from __future__ import annotations

import csv
import gzip
import io
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ConfigError

PROMPT_NAMES = ("num_prefill_tokens", "contexttokens", "prompt_tokens", "input_length", "input_tokens", "prompt")
OUTPUT_NAMES = ("num_decode_tokens", "generatedtokens", "completion_tokens", "output_length", "output_tokens", "output")
TOTAL_NAMES = ("num_total_tokens", "total_tokens", "tokens", "length")
_MAX_ROWS = 5_000_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompt and output together, of each request."""

    totals: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.totals)

    @property
    def longest(self) -> int:
        return max(self.totals)

    def percentile(self, percent: int) -> int:
        """The least length that so many percent do not pass."""
        ordered = sorted(self.totals)
        return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def read_lengths(path: Path) -> Lengths:
    """The lengths in a file. ConfigError for a file that has none, with the names that are looked for."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"--lengths {path} cannot be read ({error}); give a CSV file, gzipped or not") from error
    rows = csv.reader(io.StringIO(text))
    header = next(rows, None)
    if header is None:
        raise ConfigError(f"--lengths {path} is empty; give a CSV file with prompt and output tokens")
    names = [name.strip().lower() for name in header]
    columns = [index for index, name in enumerate(names) if name in PROMPT_NAMES or name in OUTPUT_NAMES]
    if len(columns) < 2:
        columns = [index for index, name in enumerate(names) if name in TOTAL_NAMES][:1] or columns
    found = [_total(row, columns, path) for row, _ in zip(rows, range(_MAX_ROWS), strict=False) if row]
    if not columns and all(name.isdigit() for name in names):
        columns = list(range(len(names)))
        found = [_total(row, columns, path) for row in csv.reader(io.StringIO(text)) if row]
    totals = tuple(total for total in found if total > 0)
    if not columns or not totals:
        raise ConfigError(
            f"--lengths {path} has no column of lengths; name columns {PROMPT_NAMES[0]} and {OUTPUT_NAMES[0]}, or "
            f"{TOTAL_NAMES[0]} (it has {', '.join(names[:8])})"
        )
    return Lengths(totals)


def _total(row: list[str], columns: list[int], path: Path) -> int:
    try:
        return sum(int(float(row[column])) for column in columns)
    except (ValueError, IndexError) as error:
        raise ConfigError(
            f"--lengths {path}: {','.join(row)[:60]!r} has no numbers in its columns of lengths"
        ) from error
