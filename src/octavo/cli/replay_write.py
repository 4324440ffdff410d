"""`octavo replay --write-trace`: any trace as Mooncake JSONL."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import click

from octavo.replay.cache_blocks import block_size_of, named_blocks
from octavo.replay.lines import BadLines
from octavo.replay.trace_formats import ReadOptions, mooncake_line, read_trace


def write_trace(trace: str, bad: BadLines, options: ReadOptions, values: dict[str, Any]) -> None:
    """Names of blocks become numbers from 0 on, in the order in which they first occur."""
    numbers: dict[Hashable, int] = {}
    count = size = 0
    with values["write_trace"].open("w", encoding="utf-8") as out:
        for request in read_trace(trace, bad, options):
            size = block_size_of(request, values["block_size"])
            names = named_blocks(request, size).names
            out.write(mooncake_line(request, [numbers.setdefault(name, len(numbers)) for name in names]) + "\n")
            count += 1
    click.echo(
        f"octavo: wrote {count} requests with {len(numbers)} different blocks of {size} tokens to "
        f"{values['write_trace']}; read it with --hash-block-tokens {size}",
        err=True,
    )
