"""`octavo models`: lists what the model cache holds and what can be fetched by a short name. It loads none of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from octavo.cli.units import format_bytes

if TYPE_CHECKING:
    from octavo.models.hub import ModelEntry


@click.command()
@click.option("--verify", is_flag=True, help="Read every file that an alias has here and compare its SHA-256.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_context
def models(context: click.Context, verify: bool, as_json: bool) -> None:
    """List the models of the cache, and the aliases that can be fetched.

    The exit code is 1 when --verify finds a file that is not what it should be.
    """
    from octavo.cli.model_cache import cache_dir
    from octavo.models.hub import list_models

    folder = cache_dir()
    entries = list_models(folder)
    states = [verified_state(entry, folder) if verify else state(entry) for entry in entries]
    if as_json:
        click.echo(json.dumps([entry_object(*pair) for pair in zip(entries, states, strict=True)], indent=2))
    else:
        click.echo("\n".join(table(entries, states, folder)))
    context.exit(1 if "damaged" in states else 0)


def state(entry: ModelEntry) -> str:
    """ "here", "in part" or "to be fetched", by the cache's records."""
    if entry.complete:
        return "here"
    return "to be fetched" if entry.path is None else "in part"


def verified_state(entry: ModelEntry, folder: Path) -> str:
    """The same by every byte of the file: "verified" or "damaged" where there is one to compare."""
    from octavo.cli.progress import progress_bar
    from octavo.models.aliases import find_alias
    from octavo.models.hub import verify

    alias = find_alias(entry.name)
    if alias is None or entry.path is None:
        return state(entry)
    with progress_bar(f"reading {entry.name}") as progress:
        return "verified" if verify(alias, folder, progress) else "damaged"


def entry_object(entry: ModelEntry, its_state: str) -> dict[str, object]:
    return {
        "name": entry.name,
        "about": entry.about,
        "licence": entry.licence,
        "size_bytes": entry.size_bytes,
        "sha256": entry.sha256 or None,
        "path": None if entry.path is None else str(entry.path),
        "state": its_state,
    }


def table(entries: Sequence[ModelEntry], states: Sequence[str], folder: Path) -> list[str]:
    """One line a model, and what to do about a damaged one."""
    rows = [
        (entry.name, its_state, format_bytes(entry.size_bytes), f"{entry.about} ({entry.licence})")
        for entry, its_state in zip(entries, states, strict=True)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]) for row in rows
    ]
    lines += [
        f"{entry.name} is damaged; `octavo pull {entry.name}` fetches it again"
        for entry, its_state in zip(entries, states, strict=True)
        if its_state == "damaged"
    ]
    return [*lines, f"kept in {folder}"]
