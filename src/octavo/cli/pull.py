"""`octavo pull`: fetches a model into the cache. It does not load it."""

from __future__ import annotations

import click


@click.command()
@click.argument("model", metavar="MODEL")
def pull(model: str) -> None:
    """Fetch MODEL, an alias such as smollm2 or a hub id, into the model cache, and check it."""
    from octavo.cli.model_cache import pull_model
    from octavo.errors import ModelError
    from octavo.models.hub import check_runnable

    click.echo(pull_model(model))
    try:
        check_runnable(model)
    except ModelError as error:  # it is kept all the same
        click.echo(f"octavo: {error}", err=True)
