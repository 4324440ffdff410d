"""`octavo serve --record`: a recorder on the core that is served. Its key is thrown away with the process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from octavo.cli.versions import octavo_version
from octavo.replay.recorder import Recorder

if TYPE_CHECKING:
    from octavo.cli.loading import OpenModel


@contextmanager
def recorded(path: Path, opened: OpenModel) -> Iterator[None]:
    """Record until the server has ended. Raises OSError where the file cannot be written."""
    loaded = opened.loaded
    about = {
        "octavo": octavo_version(),
        "digest": loaded.digest,
        "kv_cache_dtype": loaded.kv_cache_dtype,
        "weights_dtype": loaded.weights_dtype,
        "threads": loaded.num_threads,
    }
    recorder = Recorder(path, loaded.core, os.urandom(32), time.monotonic, about)
    click.echo(f"octavo: recording to {path}: masked token ids, no text", err=True)
    try:
        yield
    finally:
        recorder.close()
        if recorder.error is not None:
            click.echo(f"octavo: {path}: {recorder.error}", err=True)
