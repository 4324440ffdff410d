"""A text of the user as token ids, for commands that measure. It does not know what is measured."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.engine.tokenizer import Tokenizer

F = TypeVar("F", bound=Callable[..., Any])

_MOST_BYTES_PER_TOKEN = 64  # of text that is read for a number of tokens: far above every tokenizer's mean


def text_option(about: str, *, required: bool = False) -> Callable[[F], F]:
    """Decorator of a command: --text FILE, as `text_file`."""
    kind = click.Path(exists=True, dir_okay=False, path_type=Path)
    return click.option("--text", "text_file", required=required, type=kind, metavar="FILE", help=about)


def read_text(path: Path, num_tokens: int) -> str:
    """The beginning of a UTF-8 text, `.gz` unpacked: enough for so many tokens. ConfigError for anything else.

    Lines end in "\\n", whatever the file has, as when Python opens a text.
    """
    num_bytes = num_tokens * _MOST_BYTES_PER_TOKEN
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(num_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"--text {path} cannot be read ({error}); give a text file, or one packed as .gz") from error
    try:  # what is cut off may end inside a character
        text = data[:num_bytes].decode("utf-8", errors="strict" if len(data) <= num_bytes else "ignore")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {path} is not UTF-8 text ({error}); give a text file") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def token_ids_of(tokenizer: Tokenizer, path: Path, num_tokens: int) -> list[int]:
    """The first tokens of a text file. Raises ConfigError where there are none."""
    token_ids = tokenizer.encode(read_text(path, num_tokens), add_special_tokens=False, namespace="")[:num_tokens]
    if len(token_ids) < 2:
        raise ConfigError(f"--text {path} has {len(token_ids)} tokens; give a text of some thousands")
    return token_ids
