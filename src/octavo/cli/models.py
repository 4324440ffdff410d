"""`octavo models`: lists what the model cache holds. It does not load any of it."""

from __future__ import annotations

import click


@click.command()
def models() -> None:
    """List the models in the cache, and the aliases that can be fetched."""
