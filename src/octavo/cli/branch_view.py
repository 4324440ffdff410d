"""Draws the block tables of branches: which blocks they share, which are their own. It does not know why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from octavo.core.radix_node import GONE

if TYPE_CHECKING:
    from octavo.core.sharing import BranchMemory, BranchTable, Sharing

SHARED, OWN = "■", "□"
SHOWN_SHARED = 6  # of a table's shared blocks: the first and the last of them; what is left out is counted
STYLES = {SHARED: "green", OWN: "yellow"}


def memory_view(memory: BranchMemory) -> Group:
    """A table with one row a branch and KV group, and what is saved below it."""
    table = Table(title=f"block tables of {len(memory.tables)} branches", title_justify="left")
    for heading in ("branch", "tokens"):
        table.add_column(heading, justify="right")
    table.add_column(f"blocks ({SHARED} shared, {OWN} its own)")
    for row in memory.tables:
        for group in range(len(row.block_ids)):
            first = (str(row.branch), str(row.num_tokens)) if group == 0 else ("", "")
            table.add_row(*first, blocks_of(row, group))
    return Group(table, Text(summary(memory)))


def blocks_of(row: BranchTable, group: int) -> Text:
    """The blocks in their order, without those that a window has passed; a long run of shared ones is cut."""
    blocks = row.block_ids[group]
    shared = [block for block in blocks[: row.num_shared] if block != GONE]
    own = [block for block in blocks[row.num_shared :] if block != GONE]
    parts = [(SHARED, str(block)) for block in shared]
    if len(shared) > SHOWN_SHARED:
        half = SHOWN_SHARED // 2
        left_out = len(shared) - 2 * half
        parts = [*parts[:half], (SHARED, f"({left_out} more)"), *parts[-half:]]
    parts += [(OWN, str(block)) for block in own]
    return Text(" ").join(Text(mark + name, STYLES[mark]) for mark, name in parts)


def summary(memory: BranchMemory) -> str:
    """What is held and saved now, and what was saved at the peak."""
    saved = memory.sharing.saved_blocks
    return (
        f"{memory.blocks} blocks held instead of {memory.blocks + saved}: sharing saves {share(saved, memory.blocks)} "
        f"now, {peak_of(memory.sharing)}"
    )


def peak_of(sharing: Sharing) -> str:
    saved, held = sharing.peak_saved_blocks, sharing.peak_blocks
    return f"{share(saved, held)} at the peak ({held} held instead of {held + saved})"


def share(saved: int, held: int) -> str:
    return f"{saved} blocks ({saved / (saved + held):.0%})" if saved else "0 blocks"
