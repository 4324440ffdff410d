"""The tests of the core are worth something: each of these bugs, put in on purpose, is noticed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from octavo.core import prefix_match, radix_tree
from octavo.core.admission import Admission
from octavo.core.block_manager import BlockManager
from octavo.core.block_pool import BlockPool
from octavo.core.engine_core import EngineCore
from octavo.core.prefix_waits import PrefixWaits
from octavo.core.progress import Progress
from octavo.core.radix_tree import RadixTree
from octavo.core.request import Request, RequestStatus
from octavo.core.room import Room
from octavo.core.running import Running
from octavo.core.scheduler import Scheduler
from octavo.core.status import Counters
from octavo.core.step_draft import StepDraft
from tests.core.core_harness import Harness
from tests.core.seeded import SeededBugs
from tests.core.storms import STORM_WINDOWS, squeeze, storm

bug = SeededBugs()


def run_storms() -> None:
    """Tight pools, many branches and ends; the same ones with and without a bug."""
    for seed in range(12):
        rng = random.Random(seed)
        windows = STORM_WINDOWS[seed % 4]
        harness = Harness(block_size=rng.choice([2, 4]), num_blocks=11, budget=9, seats=4, windows=windows)
        storm(harness, rng, 80)
        assert squeeze(rng, windows).core.status().preemptions, "the squeeze does not squeeze"


def test_without_a_bug_nothing_is_noticed() -> None:
    run_storms()


@bug
def acquire_is_skipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "acquire", lambda self, block_ids: None)


@bug
def commit_comes_before_compute(patch: pytest.MonkeyPatch) -> None:
    add_row = StepDraft.add_row

    def add_and_commit(self: StepDraft, request: Request, end: int) -> None:
        add_row(self, request, end)
        computed, request.num_computed_tokens = request.num_computed_tokens, end
        managers[0].commit(request)
        request.num_computed_tokens = computed

    managers: list[BlockManager] = []
    begin = BlockManager.attach_prefix

    def attach(self: BlockManager, request: Request, match: prefix_match.PrefixMatch) -> object:
        managers[:] = [self]
        return begin(self, request, match)

    patch.setattr(BlockManager, "attach_prefix", attach)
    patch.setattr(StepDraft, "add_row", add_and_commit)


@bug
def copy_of_a_hit_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    attach = BlockManager.attach_prefix
    patch.setattr(BlockManager, "attach_prefix", lambda self, request, match: attach(self, request, match) and ())


@bug
def copy_on_write_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "_shared_tail", lambda self, request: ())


@bug
def the_last_copy_is_lost(patch: pytest.MonkeyPatch) -> None:
    plan = StepDraft.plan

    def lose(self: StepDraft, step_index: int, coasting: object) -> object:
        made = plan(self, step_index, coasting)
        return replace(made, copies=made.copies[:-1])

    patch.setattr(StepDraft, "plan", lose)


@bug
def copy_is_one_token_short(patch: pytest.MonkeyPatch) -> None:
    copy = BlockManager._copy

    def short(self: BlockManager, *args: object, **kwargs: object) -> object:
        made = copy(self, *args, **kwargs)  # type: ignore[arg-type]
        return tuple(replace(one, num_tokens=one.num_tokens - 1) for one in made if one.num_tokens > 1)

    patch.setattr(BlockManager, "_copy", short)


@bug
def namespace_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(radix_tree, "_root_key", lambda namespace: b"")


@bug
def match_takes_the_last_token(patch: pytest.MonkeyPatch) -> None:
    look_up = prefix_match.look_up

    def off_by_one(tree: RadixTree, request: Request, *sizes: object, token_exact: bool) -> object:
        request.token_ids.append(0)
        found = look_up(tree, request, *sizes, token_exact=token_exact)  # type: ignore[arg-type]
        request.token_ids.pop()
        return found

    patch.setattr("octavo.core.block_manager.look_up", off_by_one)


@bug
def match_inside_a_block_is_one_too_long(patch: pytest.MonkeyPatch) -> None:
    closest = RadixTree.closest_child

    def longer(self: RadixTree, namespace: str, node: object, tail: bytes) -> tuple[object, int]:
        child, count = closest(self, namespace, node, tail)  # type: ignore[arg-type]
        return child, count + 1 if child is not None and count * 4 < len(tail) else count

    patch.setattr(RadixTree, "closest_child", longer)


@bug
def match_skips_a_block(patch: pytest.MonkeyPatch) -> None:
    match = RadixTree.match
    patch.setattr(RadixTree, "match", lambda self, *args: match(self, *args)[1:])


@bug
def tokens_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    def first_child(self: RadixTree, namespace: str, tokens: bytes, num_blocks: int) -> list[object]:
        node, path = self._roots.get(namespace.encode()), []
        while node is not None and len(path) < num_blocks:
            node = next(node.children(), None)
            path += [node] if node is not None else []
        return path

    patch.setattr(RadixTree, "match", first_child)


@bug
def private_blocks_leak(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "release_private", lambda self, block_ids: self._drop(block_ids) and None)


@bug
def release_comes_twice(patch: pytest.MonkeyPatch) -> None:
    release = BlockManager.release

    def twice(self: BlockManager, request: Request) -> None:
        tables = request.block_tables
        release(self, request)
        request.block_tables = tables
        release(self, request)

    patch.setattr(BlockManager, "release", twice)


@bug
def release_starts_at_the_head(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release_cached
    patch.setattr(BlockPool, "release_cached", lambda self, block_ids: release(self, block_ids[::-1]))


@bug
def cached_blocks_are_freed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "release_cached", BlockPool.release_private)


@bug
def twin_is_not_swapped(patch: pytest.MonkeyPatch) -> None:
    insert = RadixTree.insert
    patch.setattr(RadixTree, "insert", lambda self, *args: (insert(self, *args)[0], []))


@bug
def evicted_block_stays_in_the_tree(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixTree, "remove", lambda self, block_ids: [self._node_of[b].block_ids for b in block_ids])


@bug
def branch_holds_nothing(patch: pytest.MonkeyPatch) -> None:
    fork = BlockManager.fork

    def hold_nothing(self: BlockManager, parent: Request, child: Request) -> None:
        fork(self, parent, child)
        for table in child.block_tables:
            self.pool._drop(table)

    patch.setattr(BlockManager, "fork", hold_nothing)


@bug
def abort_forgets_the_blocks(patch: pytest.MonkeyPatch) -> None:
    leave = Running.leave

    def forget(self: Running, request: Request) -> None:
        if request.finish_reason == "abort":
            self.requests.remove(request)
        else:
            leave(self, request)

    patch.setattr(Running, "leave", forget)


@bug
def aborted_request_gets_no_answer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Progress, "take_ended", lambda self: self._ended.clear() or [])


@bug
def final_answer_comes_twice(patch: pytest.MonkeyPatch) -> None:
    step = EngineCore.step

    def repeat(self: EngineCore) -> list[object]:
        outputs = step(self)
        return [*outputs, *(output for output in outputs if output.finish_reason == "abort")]

    patch.setattr(EngineCore, "step", repeat)


@bug
def preempted_request_keeps_its_place(patch: pytest.MonkeyPatch) -> None:
    release = BlockManager.release

    def keep(self: BlockManager, request: Request) -> None:
        computed = request.num_computed_tokens
        release(self, request)
        request.num_computed_tokens = computed

    attach = BlockManager.attach_prefix

    def resume(self: BlockManager, request: Request, match: prefix_match.PrefixMatch) -> object:
        computed = request.num_computed_tokens
        copies = attach(self, request, match)
        request.num_computed_tokens = max(computed, request.num_computed_tokens)
        return copies

    patch.setattr(BlockManager, "release", keep)
    patch.setattr(BlockManager, "attach_prefix", resume)


@bug
def preempted_request_still_runs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepDraft, "take_back", lambda self, request_id, branches: self.preempted.append(request_id))


@bug
def the_first_is_preempted(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt
    patch.setattr(Scheduler, "_preempt", lambda self, request, draft: preempt(self, self._running.requests[0], draft))


@bug
def nobody_is_preempted(patch: pytest.MonkeyPatch) -> None:
    plan_row = Scheduler._plan_row

    def stand_still(self: Scheduler, request: Request, draft: StepDraft) -> bool:
        end = min(len(request.token_ids), request.num_computed_tokens + draft.budget)
        if self.blocks.grow(request, end) is None and self.blocks.reach(request) <= request.num_computed_tokens:
            return False
        return plan_row(self, request, draft)

    patch.setattr(Scheduler, "_plan_row", stand_still)


@bug
def admission_counts_idle_hits_twice(patch: pytest.MonkeyPatch) -> None:
    def optimistic(self: Room, request: Request, match: prefix_match.PrefixMatch) -> int:
        spec = self._blocks.spec
        return spec.blocks_for_tokens(len(request.token_ids)) - 2 * len(match.nodes) * len(spec.groups)

    patch.setattr(Room, "to_hold", optimistic)
    patch.setattr(Scheduler, "_preempt", lambda self, request, draft: pytest.fail("preempted on admission"))


@bug
def waits_never_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixWaits, "_release", lambda self, request, committed: [])


@bug
def waiting_requests_are_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Admission, "enter", lambda self, request: None)


@bug
def hits_count_again_after_preemption(patch: pytest.MonkeyPatch) -> None:
    admit = Counters.admit

    def again(self: Counters, request: Request, *, is_query: bool) -> int:
        request.num_accounted_tokens = 0
        return admit(self, request, is_query=is_query)

    patch.setattr(Counters, "admit", again)


@bug
def recomputation_counts_as_computed(patch: pytest.MonkeyPatch) -> None:
    def account(self: Counters, request: Request, start: int, end: int) -> None:
        self.computed += end - max(start, request.num_accounted_tokens)
        request.num_accounted_tokens = max(end, request.num_accounted_tokens)

    patch.setattr(Counters, "account", account)


@bug
def failed_row_is_committed(patch: pytest.MonkeyPatch) -> None:
    stop = Progress._stop

    def commit_first(self: Progress, request: Request, finish_reason: str) -> None:
        if finish_reason == "error" and request.status is RequestStatus.RUNNING:
            request.num_computed_tokens = len(request.block_tables[0]) * self._blocks.block_size
            self._blocks.commit(request)
        stop(self, request, finish_reason)

    patch.setattr(Progress, "_stop", commit_first)


@pytest.mark.parametrize("name", bug.by_name)
def test_a_bug_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.by_name[name](monkeypatch)
    with pytest.raises((AssertionError, LookupError, pytest.fail.Exception)):
        run_storms()
