"""Puts together what the block manager tells of tables and paths. It changes nothing."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from octavo.core import events
from octavo.core.radix_node import Node
from octavo.core.request import Request


def frozen(tables: Sequence[array[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(table) for table in tables)


def committed(request: Request, above: Node | None, count: int, num_twins: int) -> events.BlocksCommitted:
    """The last `count` token blocks of the request's path, below `above`; the first ones of them are twins."""
    node, found = request.node, []
    for _ in range(count):
        assert node is not None
        found.append(events.CommittedBlock(node.block_ids, node.key, node.block_key))
        node = node.parent
    found.reverse()
    parent = above.block_ids if above is not None else ()
    before = request.num_committed_blocks - count
    about = (request.request_id, request.namespace, before, parent)
    return events.BlocksCommitted(*about, tuple(found[num_twins:]), tuple(found[:num_twins]))


def passed(request: Request, by_group: Sequence[tuple[int, int, list[int]]]) -> events.BlocksPassed:
    """by_group: group, index of the first, block ids."""
    tables: list[tuple[int, ...]] = [()] * len(request.block_tables)
    for group, _, block_ids in by_group:
        tables[group] = tuple(block_ids)
    return events.BlocksPassed(request.request_id, tuple(tables))
