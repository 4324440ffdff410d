"""A progress bar on the terminal for work that takes seconds. It does not know what the work is.

Nothing is drawn where standard error is no terminal, so that logs stay readable, and nothing before the work tells how
far it is: what is here already shows no bar.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

Progress = Callable[[int, int], None]  # (bytes done, bytes in all; 0 where that is not known)


@contextmanager
def progress_bar(label: str) -> Iterator[Progress | None]:
    """Gives the function to call with how far the work is, or None where nobody would see it."""
    if not sys.stderr.isatty():
        yield None
        return
    with ExitStack() as stack:
        yield _Bar(label, stack).show


class _Bar:
    """One bar, drawn from the first call of `show` to the end of the stack."""

    def __init__(self, label: str, stack: ExitStack) -> None:
        self._label = label
        self._stack = stack
        self._drawn: tuple[Bars, TaskID] | None = None

    def show(self, done: int, total: int) -> None:
        bars, task = self._drawn or self._draw()
        bars.update(task, completed=done, total=total or None)

    def _draw(self) -> tuple[Bars, TaskID]:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bars

        label = TextColumn("{task.description}")
        columns = (label, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        bars = self._stack.enter_context(Bars(*columns, console=Console(stderr=True), transient=True))
        self._drawn = bars, bars.add_task(self._label, total=None)
        return self._drawn
