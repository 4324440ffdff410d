"""What must be true inside the block manager between two steps: pool, tree, tables and windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.core.radix_node import GONE, Node
from octavo.core.request import Request
from tests.core.group_windows import blocks_behind

if TYPE_CHECKING:
    from tests.core.core_harness import Harness


def check_structure(harness: Harness) -> None:
    pool, tree, running = harness.blocks.pool, harness.blocks.tree, harness.scheduler.running
    held = Counter(block for r in running for table in r.block_tables for block in table if block != GONE)
    assert [held[block] for block in range(pool.num_blocks)] == pool.ref_count, "references are not holders"
    free, idle = list(pool.free_block_ids), list(pool.idle)
    assert sorted([*free, *idle, *held]) == list(range(pool.num_blocks)), "a block is in two places, or in none"
    nodes = list(tree.nodes())
    indexed = indexed_blocks(harness)
    assert not indexed & set(free), "a free block can be hit"
    assert set(idle) <= indexed, "an idle block can never be hit"
    assert sum(block != GONE for node in nodes for block in node.block_ids) == len(indexed), "it is indexed twice"
    paths, told = dict[Node, bytes](), dict[int, tuple[int, bytes]]()
    for node in nodes:
        assert node.parent is not None
        paths[node] = paths.get(node.parent, node.parent.key + b"|") + node.key
        told.update({block: (group, paths[node]) for group, block in enumerate(node.block_ids) if block != GONE})
    assert harness.resident == told, "the events tell another cache"
    place = {block: index for index, block in enumerate(idle)}
    for node in nodes:
        check_node(harness, node, place)
    groups = harness.core.status().kv_group_blocks
    assert sum(one.used for one in groups) == len(held)
    assert [one.cached for one in groups] == [sum(told[b][0] == g for b in idle) for g in range(len(groups))]
    orders = [request.order for request in running]
    assert orders == sorted(orders)
    for request in running:
        check_path(harness, request)
        check_window_blocks(harness, request.block_tables, request.num_computed_tokens - request.num_dropped_tokens, 0)


def check_node(harness: Harness, node: Node, place: dict[int, int]) -> None:
    """place: of each idle block, in the order in which they would go."""
    growing = [group for group, window in enumerate(harness.windows) if window is None]
    assert all(node.block_ids[group] != GONE for group in growing)
    assert any(block != GONE for block in node.block_ids) or any(node.children()), "a node without use"
    parent = node.parent.block_ids if node.parent is not None else ()
    for group in growing if parent else ():
        if parent[group] in place:
            assert node.block_ids[group] in place, "a parent is idle while its child is held"
            assert place[node.block_ids[group]] < place[parent[group]], "it is available, and cannot be had"
    if growing and node.block_ids[growing[0]] in place:
        assert all(block in place for block in node.block_ids if block != GONE), "it is held and would be evicted"


def check_path(harness: Harness, request: Request) -> None:
    node, size = request.node, harness.spec.block_size
    for index in reversed(range(request.num_committed_blocks)):
        assert node is not None
        for one, table in zip(node.block_ids, request.block_tables, strict=True):
            assert table[index] in (one, GONE), "a table is no path"
        assert node.key == request.token_ids[index * size : (index + 1) * size].tobytes()
        node = node.parent
    assert node is None or node.key == request.namespace.encode(), "a path of another namespace"


def indexed_blocks(harness: Harness) -> set[int]:
    return {block for node in harness.blocks.tree.nodes() for block in node.block_ids if block != GONE}


def check_window_blocks(harness: Harness, tables: Sequence[Sequence[int]], start: int, num_tokens: int) -> None:
    """Between steps (0 tokens) a window and one block more at most, during a step its tokens more: to the block."""
    size = harness.spec.block_size
    for table, window in zip(tables, harness.windows, strict=True):
        first = 0 if window is None else max(0, start // size - blocks_behind(window, size))
        assert [block == GONE for block in table] == [index < first for index in range(len(table))]
        if harness.config.enable_kv_cache:
            assert len(table) <= -(-(start + num_tokens) // size), "blocks beyond the text are held"
        held = len(table) - first
        bound = None if window is None else -(-window // size) + -(-num_tokens // size) + 1
        assert bound is None or held <= bound, "a window holds too much"
