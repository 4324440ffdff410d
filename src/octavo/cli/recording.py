"""`octavo serve --record`: a recorder on the core that is served. Its key is thrown away with the process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from octavo.cli.versions import octavo_version
from octavo.replay.recorder import Recorder

if TYPE_CHECKING:
    from octavo.cli.loading import OpenModel


@contextmanager
def recorded(path: Path, opened: OpenModel, *, with_text: bool = False) -> Iterator[None]:
    """Record until the server has ended. Raises OSError where the file cannot be written."""
    loaded = opened.loaded
    about = {
        "octavo": octavo_version(),
        "digest": loaded.digest,
        "kv_cache_dtype": loaded.kv_cache_dtype,
        "weights_dtype": loaded.weights_dtype,
        "threads": loaded.num_threads,
    }
    decode = partial(loaded.tokenizer.decode, skip_special_tokens=False) if with_text else None
    recorder = Recorder(path, loaded.core, os.urandom(32), time.monotonic, about, decode=decode)
    what = "masked token ids, and all that is asked and answered as text" if with_text else "masked token ids, no text"
    click.echo(f"octavo: recording to {path}: {what}", err=True)
    try:
        yield
    finally:
        recorder.close()
        if recorder.error is not None:
            click.echo(f"octavo: {path}: {recorder.error}", err=True)
