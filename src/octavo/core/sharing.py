"""How much memory branches of a request have in common, counted from their block tables. Pure.

Blocks that are shared stand in the same places: branches share what they have in common from the start of their text,
as far as windows have not passed it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from octavo.core.radix_node import GONE
from octavo.core.radix_tree import common_tokens


@dataclass(frozen=True, slots=True)
class Sharing:
    """Of one request. `peak_saved_blocks` were saved when `peak_blocks` were held: that was when most were saved."""

    saved_blocks: int = 0  # blocks that its branches would need without sharing, less those that they hold
    peak_saved_blocks: int = 0
    peak_blocks: int = 0  # blocks held then


@dataclass(frozen=True, slots=True)
class BranchTable:
    branch: int
    num_tokens: int  # computed, so in the blocks
    block_ids: tuple[tuple[int, ...], ...]  # one table per KV group; -1: a window has passed
    num_shared: int  # so many of the first entries of each table another branch has as well


@dataclass(frozen=True, slots=True)
class BranchMemory:
    """What the branches of one request hold now."""

    request_id: str
    tables: tuple[BranchTable, ...]
    blocks: int  # different ones
    sharing: Sharing


def count_blocks(tables: Sequence[array[int]]) -> tuple[int, int]:
    """Different blocks in what branches hold of one KV group, and blocks that they would be without sharing.

    Those that start in the same place can be compared from there on; others, behind a window, are short.
    """
    total = sum(map(len, tables))
    if len({table[0] for table in tables if table}) > 1:
        return len({block_id for table in tables for block_id in table}), total
    texts = sorted(table.tobytes() for table in tables)
    common = sum(common_tokens(one, other) for one, other in pairwise(texts))
    return total - common, total


def num_shared(table: array[int], others: Sequence[array[int]]) -> int:
    """How many of its first entries another table has as well, as far as both still hold blocks there."""
    return max((_num_common(table, other) for other in others), default=0)


def _num_common(one: array[int], other: array[int]) -> int:
    first = max(_num_gone(one), _num_gone(other))
    common = common_tokens(one[first:].tobytes(), other[first:].tobytes())
    return first + common if common else 0


def _num_gone(table: array[int]) -> int:
    return sum(1 for _ in takewhile(lambda block_id: block_id == GONE, table))
