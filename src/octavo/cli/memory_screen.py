"""Shows on standard error what branches hold: on a terminal while they grow, and at the end as it was last.

It does not know how a block table is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

    from octavo.core.sharing import BranchMemory

OnMemory = Callable[["tuple[BranchMemory, ...]"], None]


@contextmanager
def memory_screen(*, wanted: bool) -> Iterator[OnMemory | None]:
    """Gives the function to call with the memory of all requests that have branches, or None if nobody wants it."""
    if not wanted:
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    if not console.is_terminal:
        last = _Last(None)
        yield last.take
        for one in last.memory.values():
            console.print(_drawn([one]))
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield _Last(live).take


class _Last:
    """The newest state of each request, also once it has ended and gives its blocks back."""

    def __init__(self, live: Live | None) -> None:
        self.memory: dict[str, BranchMemory] = {}
        self._live = live

    def take(self, memories: tuple[BranchMemory, ...]) -> None:
        found = {memory.request_id: memory for memory in memories if memory.blocks}
        if not found:
            return
        self.memory.update(found)
        if self._live is not None:
            self._live.update(_drawn(list(self.memory.values())), refresh=True)


def _drawn(memories: list[BranchMemory]) -> Group:
    from rich.console import Group

    from octavo.cli.branch_view import memory_view

    return Group(*(memory_view(memory) for memory in memories))
