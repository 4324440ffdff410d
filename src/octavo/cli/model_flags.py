"""The argument and the flags that every command has which loads a model. It does not load one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from octavo.cli.flags import flags_of
from octavo.cli.refused_flags import refuse_flags
from octavo.core.config import SchedulerConfig
from octavo.executor.config import ExecutorConfig

F = TypeVar("F", bound=Callable[..., Any])

model_argument = click.argument("model", metavar="MODEL")

_chat_template = click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A Jinja file to write chats with. [default: the model's own]",
)


def model_flags(function: F) -> F:
    """Decorator of a command: how the model is held and scheduled."""
    return flags_of(SchedulerConfig, ExecutorConfig)(_chat_template(refuse_flags(function)))
