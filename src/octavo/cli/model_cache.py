"""Where models are kept and how one gets there: `models.hub` with the environment. It does not know formats."""

from __future__ import annotations

from pathlib import Path

from octavo.cli import environment
from octavo.cli.progress import progress_bar
from octavo.models import hub


def cache_dir() -> Path:
    return environment.cache_dir() or hub.default_cache_dir()


def resolve_model(reference: str) -> Path:
    """The files of a model that is to run, fetched with a progress bar where they are not here yet."""
    hub.check_runnable(reference)
    with progress_bar(f"fetching {reference}") as progress:
        return hub.resolve(reference, cache_dir=cache_dir(), progress=progress)


def pull_model(reference: str) -> Path:
    """The same, and every byte is checked, also of what was here before."""
    with progress_bar(f"fetching {reference}") as progress:
        return hub.pull(reference, cache_dir=cache_dir(), progress=progress)
