"""The one door to blocks: hits inside a block, branches, twins, and what leaves first."""

from __future__ import annotations

import pytest

from octavo.core.block_manager import BlockManager
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import BlockCopy
from octavo.errors import ConfigError
from tests.core.group_windows import kv_spec


def manager(num_blocks: int = 8, **options: object) -> BlockManager:
    return BlockManager(kv_spec(4), num_blocks, **options)  # type: ignore[arg-type]


def request_of(tokens: list[int], request_id: str = "r", namespace: str = "") -> Request:
    return Request(request_id, tokens, SamplingParams(), seed=0, namespace=namespace)


def run(blocks: BlockManager, request: Request) -> tuple[int, tuple[BlockCopy, ...]]:
    """Attach, and compute all known tokens. Returns the tokens hit and the copies."""
    match = blocks.find_prefix(request)
    copies = blocks.attach_prefix(request, match)
    hit = request.num_computed_tokens
    grown = blocks.grow(request, len(request.token_ids))
    assert grown == ()
    request.num_computed_tokens = len(request.token_ids)
    blocks.commit(request)
    return hit, copies


def live(blocks: BlockManager, tokens: list[int], namespace: str = "") -> int:
    request = request_of(tokens, namespace=namespace)
    hit, _ = run(blocks, request)
    blocks.release(request)
    return hit


@pytest.mark.parametrize("length", range(1, 14))
def test_a_fully_cached_prompt_hits_all_but_its_last_token(length: int) -> None:
    """F16, at every offset within a block."""
    blocks = manager()
    tokens = list(range(14))
    live(blocks, tokens)
    assert live(blocks, tokens[:length]) == min(length - 1, 12)


@pytest.mark.parametrize("same", range(13))
def test_a_hit_ends_at_the_token_where_the_texts_part(same: int) -> None:
    blocks = manager(16)
    tokens = list(range(12))
    live(blocks, tokens)
    request = request_of([*tokens[:same], 99, 98, 97])
    hit, copies = run(blocks, request)
    assert hit == same
    assert len(copies) == (1 if same % 4 else 0)
    if copies:
        (copy,) = copies
        assert (copy.num_tokens, copy.target) == (same % 4, request.block_tables[0][same // 4])
        assert copy.source not in request.block_tables[0]


def test_formats_that_cannot_be_cut_hit_whole_blocks() -> None:
    blocks = manager(token_exact_hits=False)
    live(blocks, list(range(12)))
    assert live(blocks, list(range(12))) == 8
    assert blocks.num_copies == 0


def test_without_prefix_caching_nothing_is_kept() -> None:
    blocks = manager(enable_prefix_caching=False)
    live(blocks, list(range(12)))
    assert live(blocks, list(range(12))) == 0
    assert blocks.pool.num_free == 8


def test_the_source_of_a_copy_is_not_its_own_target() -> None:
    """With one block to spare beside the source the hit inside the block is had, with none it is not."""
    tokens = [1, 2, 3, 4]
    for num_blocks, hit in ((2, 3), (1, 0)):
        blocks = manager(num_blocks)
        live(blocks, tokens)
        request = request_of([1, 2, 3, 9])
        assert run(blocks, request)[0] == hit
        assert blocks.pool.num_available == num_blocks - 1


def test_a_source_may_be_evicted_in_the_step_that_copies_it() -> None:
    blocks = manager(2)
    live(blocks, [1, 2, 3, 4])
    source = blocks.tree.match("", request_of([1, 2, 3, 4]).token_ids.tobytes(), 1)[0].block_ids[0]
    request = request_of([1, 2, 3, 9, 9, 9, 9, 9])
    (copy,) = blocks.attach_prefix(request, blocks.find_prefix(request))
    assert copy.source == source
    assert blocks.grow(request, 8) == ()
    assert source in request.block_tables[0]


def test_a_twin_is_given_back() -> None:
    """Two requests compute the same block at once: one block stays."""
    blocks = manager()
    one, two = request_of([1, 2, 3, 4, 5], "one"), request_of([1, 2, 3, 4, 6], "two")
    for request in (one, two):
        blocks.attach_prefix(request, blocks.find_prefix(request))
        blocks.grow(request, 5)
        request.num_computed_tokens = 5
    assert blocks.pool.num_free == 4
    blocks.commit(one)
    blocks.commit(two)
    assert one.block_tables[0][0] == two.block_tables[0][0]
    assert blocks.pool.num_free == 5
    assert blocks.pool.ref_count[one.block_tables[0][0]] == 2


def test_the_least_recently_used_leaf_leaves_first() -> None:
    blocks = manager(8)
    live(blocks, [1, 1, 1, 1, 2, 2, 2, 2, 0])
    live(blocks, [3, 3, 3, 3, 0])
    live(blocks, [1, 1, 1, 1, 2, 2, 2, 2, 0])  # used again: now the other one is older
    blocks.supply.evict(1)
    assert live(blocks, [3, 3, 3, 3, 0]) == 0
    blocks.reset_prefix_cache()
    live(blocks, [1, 1, 1, 1, 2, 2, 2, 2, 0])
    blocks.supply.evict(1)
    assert blocks.find_prefix(request_of([1, 1, 1, 1, 2, 2, 2, 2, 0])).num_tokens == 4, "the leaf goes, not its parent"


def test_reset_spares_what_is_held() -> None:
    blocks = manager(8)
    live(blocks, [1, 1, 1, 1, 2, 2, 2, 2, 0])
    request = request_of([1, 1, 1, 1, 5])
    run(blocks, request)
    assert blocks.reset_prefix_cache() == 1
    assert blocks.find_prefix(request_of([1, 1, 1, 1, 2, 2, 2, 2, 0])).num_tokens == 4
    blocks.release(request)
    assert blocks.reset_prefix_cache() == 1
    assert blocks.pool.num_free == 8


def test_branches_share_and_copy_the_last_part_when_they_write() -> None:
    blocks = manager()
    parent = request_of([1, 2, 3, 4, 5, 6], "parent")
    run(blocks, parent)
    child = request_of([1, 2, 3, 4, 5, 6], "child")
    blocks.fork(parent, child)
    assert child.block_tables == parent.block_tables
    assert blocks.pool.num_available == 6, "a branch costs nothing yet"
    first, last = parent.block_tables[0]
    for branch in (parent, child):
        branch.token_ids.append(7)
    copies = blocks.grow(parent, 7)
    assert copies == (BlockCopy(last, parent.block_tables[0][1], 2),)
    assert parent.block_tables[0][1] != last
    assert blocks.grow(child, 7) == (), "the other holds the block alone now"
    assert child.block_tables[0].tolist() == [first, last]
    assert blocks.pool.ref_count[first] == 2
    blocks.release(parent)
    blocks.release(child)
    assert blocks.pool.num_available == 8


def test_a_branch_that_ends_saves_the_copy() -> None:
    blocks = manager()
    parent = request_of([1, 2, 3, 4, 5, 6], "parent")
    run(blocks, parent)
    child = request_of([1, 2, 3, 4, 5, 6], "child")
    blocks.fork(parent, child)
    blocks.release(child)
    parent.token_ids.append(7)
    assert blocks.grow(parent, 7) == ()
    assert blocks.num_copies == 0


def test_a_branch_at_the_end_of_a_block_needs_no_copy() -> None:
    blocks = manager()
    parent = request_of([1, 2, 3, 4], "parent")
    run(blocks, parent)
    child = request_of([1, 2, 3, 4], "child")
    blocks.fork(parent, child)
    for branch in (parent, child):
        branch.token_ids.append(7)
        assert blocks.grow(branch, 5) == ()
    assert parent.block_tables[0][0] == child.block_tables[0][0]
    assert parent.block_tables[0][1] != child.block_tables[0][1]


def test_growing_is_all_or_nothing() -> None:
    blocks = manager(2)
    request = request_of(list(range(12)))
    blocks.attach_prefix(request, blocks.find_prefix(request))
    assert blocks.grow(request, 12) is None
    assert (blocks.pool.num_free, len(request.block_tables[0])) == (2, 0)
    assert blocks.reach(request) == 8
    assert blocks.grow(request, 8) == ()


def test_a_branch_that_cannot_copy_cannot_grow() -> None:
    blocks = manager(2)
    parent = request_of([1, 2, 3, 4, 5, 6], "parent")
    run(blocks, parent)
    child = request_of([1, 2, 3, 4, 5, 6], "child")
    blocks.fork(parent, child)
    parent.token_ids.append(7)
    assert blocks.grow(parent, 7) is None
    assert blocks.reach(parent) == 6


def test_a_node_holds_a_block_of_every_group() -> None:
    blocks = BlockManager(kv_spec(4, (None, None, None)), 12)
    request = request_of(list(range(9)))
    run(blocks, request)
    assert [len(table) for table in request.block_tables] == [3, 3, 3]
    nodes = list(blocks.tree.nodes())
    assert [node.block_ids for node in nodes] == list(zip(*[table[:2] for table in request.block_tables], strict=True))
    blocks.release(request)
    assert (blocks.pool.num_free, len(blocks.pool.idle)) == (6, 6)
    blocks.supply.evict(1)
    assert (blocks.pool.num_free, len(blocks.pool.idle)) == (9, 3), "with a node go its blocks of all groups"


def test_a_pool_without_room_for_one_block_a_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 blocks"):
        BlockManager(kv_spec(4, (None, None, None)), 2)
