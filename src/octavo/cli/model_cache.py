"""Where models are kept and how one gets there: `models.hub` with the environment. It does not know formats."""

from __future__ import annotations

from pathlib import Path

from octavo.cli import environment
from octavo.cli.progress import progress_bar


def cache_dir() -> Path:
    from octavo.models import hub

    return environment.cache_dir() or hub.default_cache_dir()


def resolve_model(reference: str) -> Path:
    """The files of a model, fetched with a progress bar where they are not here yet."""
    from octavo.models.hub import resolve

    with progress_bar(f"fetching {reference}") as progress:
        return resolve(reference, cache_dir=environment.cache_dir(), progress=progress)
