"""KV groups whose layers read a window of tokens: which blocks a sequence keeps, and which a hit needs.

Block i of such a group may go once k full blocks are computed and i < k - behind: every later row reads from the first
kept block on at most (see `KVGroupSpec.num_blocks_behind`). It knows block tables and nodes, no order and no memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from octavo.core.kv_spec import KVSpec
from octavo.core.radix_node import GONE, Node
from octavo.core.request import Request


class Windows:
    """The windows of a model's KV groups. Immutable."""

    __slots__ = ("_block_size", "behind", "growing", "num_groups", "widest")

    def __init__(self, spec: KVSpec) -> None:
        self._block_size = spec.block_size
        behind = [(group, one.num_blocks_behind(spec.block_size)) for group, one in enumerate(spec.groups)]
        self.num_groups = len(behind)
        self.behind = [(group, count) for group, count in behind if count is not None]  # group, blocks kept
        self.growing = [group for group, count in behind if count is None]
        self.widest = max((count for _, count in self.behind), default=0)

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self.behind)

    def reach_of(self, nodes: Sequence[Node]) -> int:
        """How many of the first nodes of a path can be attached: the last blocks are there that a hit must read."""
        end = len(nodes)
        index = end - 1
        while index >= max(0, end - self.widest):
            ids = nodes[index].block_ids
            if GONE in ids and any(ids[group] == GONE and index >= end - count for group, count in self.behind):
                end = index
            index -= 1
        return end

    def tables_of(self, nodes: Sequence[Node]) -> tuple[list[array[int]], list[int]]:
        """One table per group for a request that attaches to this path, and the entries of each that are GONE."""
        passed = [0] * self.num_groups
        for group, count in self.behind:
            passed[group] = max(0, len(nodes) - count)
        tables = [
            array("i", [GONE] * first + [node.block_ids[group] for node in nodes[first:]])
            for group, first in enumerate(passed)
        ]
        return tables, passed

    def take_passed(self, request: Request) -> list[tuple[int, int, list[int]]]:
        """Take what the windows have passed out of the request's tables: group, index of the first, block ids."""
        full = request.num_computed_tokens // self._block_size
        found = []
        for group, count in self.behind:
            first, end = request.num_passed_blocks[group], full - count
            if end > first:
                table = request.block_tables[group]
                found.append((group, first, table[first:end].tolist()))
                table[first:end] = array("i", [GONE] * (end - first))
                request.num_passed_blocks[group] = end
        return found
