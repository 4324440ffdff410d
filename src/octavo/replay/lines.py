"""Numbered lines of a trace file: plain or gzip, a path, a folder of files, or standard input. It knows no format."""

from __future__ import annotations

import contextlib
import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from octavo.errors import ConfigError, OctavoError

STANDARD_INPUT = "-"
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_REMEMBERED = 20  # bad lines that are kept with their reason; all are counted
_MAX_LINE_BYTES = 256 << 20


class TraceError(OctavoError):
    """A trace that cannot be read: what is wrong, in which line, and what to do."""


@dataclass(slots=True)
class BadLines:
    """What to do with a line that cannot be read, and how many there were. Owned by who reads the trace."""

    skip: bool = False
    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def found(self, name: str, number: int, reason: str) -> None:
        """Raises TraceError unless bad lines are skipped."""
        message = f"{name}, line {number}: {reason}"
        if not self.skip:
            raise TraceError(f"{message}; correct it, or pass over such lines with --bad-lines skip")
        self.count += 1
        if len(self.reasons) < _MAX_REMEMBERED:
            self.reasons.append(message)


@dataclass(frozen=True, slots=True)
class NumberedLine:
    name: str  # of the file
    number: int  # from 1
    text: str


def trace_files(source: str) -> list[str]:
    """The files of a trace: itself, or those of a folder by name. Raises ConfigError where there are none."""
    if source == STANDARD_INPUT:
        return [source]
    path = Path(source)
    if path.is_dir():
        found = sorted(str(file) for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        if not found:
            raise ConfigError(f"{source} is an empty folder; give a trace file, a folder of them, or - for input")
        return found
    if not path.is_file():
        raise ConfigError(f"there is no trace {source}; give a file, a folder of files, or - for standard input")
    return [source]


def read_lines(name: str, bad: BadLines, data: IO[bytes] | None = None) -> Iterator[NumberedLine]:
    """The lines of one file as they come, without their ends; empty ones are left out."""
    shown = "standard input" if name == STANDARD_INPUT else Path(name).name
    with contextlib.ExitStack() as stack:
        if data is None:
            data = sys.stdin.buffer if name == STANDARD_INPUT else stack.enter_context(open(name, "rb"))
        yield from _decoded(shown, data, bad)


def _decoded(shown: str, data: IO[bytes], bad: BadLines) -> Iterator[NumberedLine]:
    buffered = data if isinstance(data, io.BufferedReader) else io.BufferedReader(data)  # type: ignore[type-var]
    is_packed = buffered.peek(2)[:2] == _GZIP_MAGIC
    stream = gzip.GzipFile(fileobj=buffered) if is_packed else buffered
    number = 0
    try:
        while line := stream.readline(_MAX_LINE_BYTES):
            number += 1
            if len(line) >= _MAX_LINE_BYTES:
                raise TraceError(f"{shown}, line {number} is longer than {_MAX_LINE_BYTES} bytes: it is no trace")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                bad.found(shown, number, f"it is no UTF-8 text ({error.reason} at byte {error.start})")
                continue
            if text:
                yield NumberedLine(shown, number, text)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{shown} is cut off or damaged after line {number} ({error}); fetch it again") from error
