"""Reads what a user says: from a terminal with editing and history, or line by line from a pipe.

A line that ends with a backslash goes on in the next one; a line of three double quotes begins and ends a text of
several lines. It does not know what a message means.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator

from octavo.errors import InvalidRequestError

BLOCK_QUOTES = '"""'
FIRST_PROMPT, NEXT_PROMPT = "> ", ". "
ReadLine = Callable[[str], str]  # prompt -> line without its end; EOFError when there is no more


def terminal_line_reader() -> ReadLine:
    """`input` with editing where the system has it; without prompts when standard input is not a terminal."""
    if not sys.stdin.isatty():
        return _read_piped_line
    with contextlib.suppress(ImportError):  # plain input where there is none
        importlib.import_module("readline")  # editing and history come with the import
    return input


def messages(read_line: ReadLine) -> Iterator[str]:
    """What the user says, message by message, until the end of input. KeyboardInterrupt drops what was half written."""
    while True:
        try:
            yield read_message(read_line)
        except EOFError:
            return


def read_message(read_line: ReadLine) -> str:
    """One message, stripped; EOFError at the end of input (a half-written message at the end counts as whole)."""
    first = read_line(FIRST_PROMPT)
    if first.strip().startswith(BLOCK_QUOTES):
        return _read_block(first.strip()[len(BLOCK_QUOTES) :], read_line)
    lines = [first]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        try:
            lines.append(read_line(NEXT_PROMPT))
        except EOFError:
            break
    return "\n".join(lines).strip()


def _read_block(first: str, read_line: ReadLine) -> str:
    lines, line = [], first
    while not line.rstrip().endswith(BLOCK_QUOTES):
        lines.append(line)
        try:
            line = read_line(NEXT_PROMPT)
        except EOFError:
            break
    else:
        lines.append(line.rstrip()[: -len(BLOCK_QUOTES)])
    return "\n".join(lines).strip()


def _read_piped_line(_: str) -> str:
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"standard input is not UTF-8 text ({error}); send text") from error
    if not line:
        raise EOFError
    return line.removesuffix("\n")
