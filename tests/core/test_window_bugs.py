"""The tests of windows are worth something: each of these bugs, put in on purpose, is noticed."""

from __future__ import annotations

import random

import pytest

from octavo.core import prefix_match
from octavo.core.block_manager import BlockManager
from octavo.core.block_pool import BlockPool
from octavo.core.kv_spec import KVGroupSpec
from octavo.core.radix_tree import RadixTree
from octavo.core.request import Request
from octavo.core.windows import Windows
from tests.core.core_harness import Harness
from tests.core.seeded import SeededBugs
from tests.core.storms import branch_storm, storm

bug = SeededBugs()
WINDOWS: tuple[tuple[int | None, ...], ...] = ((None, 5), (3,), (None, 2, 9), (4, 11))


def run_window_storms() -> None:
    for seed in range(32):
        rng = random.Random(seed)
        harness = Harness(
            block_size=rng.choice([2, 4]),
            num_blocks=rng.choice([9, 12]),
            budget=rng.choice([5, 9]),
            seats=4,
            windows=WINDOWS[seed % 4],
            kv_cache=seed % 8 != 7,
            prefix_caching=seed % 8 != 6,
        )
        (branch_storm if seed % 3 == 2 else storm)(harness, rng, 80)


def test_without_a_bug_nothing_is_noticed() -> None:
    run_window_storms()


@bug
def blocks_are_given_up_one_too_early(patch: pytest.MonkeyPatch) -> None:
    behind = KVGroupSpec.num_blocks_behind
    patch.setattr(KVGroupSpec, "num_blocks_behind", lambda self, size: self.window and (behind(self, size) or 1) - 1)


@bug
def blocks_are_given_up_one_too_late(patch: pytest.MonkeyPatch) -> None:
    behind = KVGroupSpec.num_blocks_behind
    patch.setattr(KVGroupSpec, "num_blocks_behind", lambda self, size: self.window and (behind(self, size) or 1) + 1)


@bug
def blocks_are_never_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Windows, "take_passed", lambda self, request: [])


@bug
def blocks_that_were_passed_leak(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "release_passed", lambda self, block_ids: None)


@bug
def blocks_that_were_passed_are_freed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "release_passed", BlockPool.release_private)


@bug
def the_table_keeps_what_was_passed(patch: pytest.MonkeyPatch) -> None:
    take = Windows.take_passed

    def keep(self: Windows, request: Request) -> object:
        tables = [table[:] for table in request.block_tables]
        found = take(self, request)
        request.block_tables = tables
        return found

    patch.setattr(Windows, "take_passed", keep)


@bug
def a_hit_does_not_look_at_windows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Windows, "reach_of", lambda self, nodes: len(nodes))


@bug
def a_hit_looks_one_block_less_far(patch: pytest.MonkeyPatch) -> None:
    reach = Windows.reach_of

    def near(self: Windows, nodes: list[object]) -> int:
        narrow = Windows.__new__(Windows)
        narrow.behind = [(group, count - 1) for group, count in self.behind]
        narrow.widest = self.widest - 1
        return reach(narrow, nodes)  # type: ignore[arg-type]

    patch.setattr(Windows, "reach_of", near)


@bug
def a_block_that_is_gone_is_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_match, "GONE", -2)


@bug
def an_evicted_window_block_stays_in_the_tree(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixTree, "take_out", lambda self, block_id, group: None)


@bug
def nodes_without_blocks_stay(patch: pytest.MonkeyPatch) -> None:
    take_out = RadixTree.take_out

    def leave(self: RadixTree, block_id: int, group: int) -> None:
        node = self._node_of[block_id]
        assert node is not None
        if sum(one >= 0 for one in node.block_ids) > 1 or any(node.children()):
            take_out(self, block_id, group)
        else:
            node.block_ids, self._node_of[block_id] = (-1,) * len(node.block_ids), None

    patch.setattr(RadixTree, "take_out", leave)


@bug
def what_is_gone_does_not_come_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixTree, "_refill", lambda self, node, block_ids: None)


@bug
def what_comes_back_is_not_registered(patch: pytest.MonkeyPatch) -> None:
    refill = RadixTree._refill

    def forget(self: RadixTree, node: object, block_ids: tuple[int, ...]) -> None:
        known = self._node_of[:]
        refill(self, node, block_ids)  # type: ignore[arg-type]
        self._node_of[:] = known

    patch.setattr(RadixTree, "_refill", forget)


@bug
def a_branch_holds_nothing_of_windows(patch: pytest.MonkeyPatch) -> None:
    fork = BlockManager.fork

    def hold_less(self: BlockManager, parent: Request, child: Request) -> None:
        fork(self, parent, child)
        for group, _ in self.windows.behind:
            self.pool._drop(child.held_blocks(group))

    patch.setattr(BlockManager, "fork", hold_less)


@bug
def a_branch_forgets_what_was_passed(patch: pytest.MonkeyPatch) -> None:
    fork = BlockManager.fork

    def forget(self: BlockManager, parent: Request, child: Request) -> None:
        fork(self, parent, child)
        child.num_passed_blocks = [0] * self.num_groups

    patch.setattr(BlockManager, "fork", forget)


@bug
def text_is_computed_again_behind_a_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "restart", lambda self, request: setattr(request, "num_computed_tokens", 0))


@pytest.mark.parametrize("name", bug.by_name)
def test_a_bug_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.by_name[name](monkeypatch)
    with pytest.raises((AssertionError, LookupError, ValueError, pytest.fail.Exception)):
        run_window_storms()
