"""The tests of the core are worth something: each of these bugs, put in on purpose, is noticed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from octavo.core import branches, prefix_match, progress, radix_tree, request_check
from octavo.core.admission import Admission
from octavo.core.block_manager import BlockManager
from octavo.core.block_pool import BlockPool
from octavo.core.branches import Branches
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
from tests.core.core_harness import Harness, branch_storm, squeeze, storm

Patch = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, Patch] = {}
STORM_WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None, 5), (None,), (None, None))


def bug(put_in: Patch) -> Patch:
    BUGS[put_in.__name__] = put_in
    return put_in


def run_storms() -> None:
    """Tight pools, many branches and ends; the same ones with and without a bug."""
    for seed in range(12):
        rng = random.Random(seed)
        windows = STORM_WINDOWS[seed % 4]
        harness = Harness(block_size=rng.choice([2, 4]), num_blocks=11, budget=9, seats=4, windows=windows)
        storm(harness, rng, 80)
        assert squeeze(rng, windows).core.status().preemptions, "the squeeze does not squeeze"


def run_branch_storms() -> None:
    for seed in range(25):
        rng = random.Random(seed)
        harness = Harness(
            block_size=rng.choice([2, 4]),
            num_blocks=24,
            budget=9,
            seats=6,
            windows=STORM_WINDOWS[seed % 4],
            prefix_caching=seed % 3 != 1,
            vocab_size=rng.choice([3, 12]),
        )
        branch_storm(harness, rng, 80)


def test_without_a_bug_nothing_is_noticed() -> None:
    run_storms()
    run_branch_storms()


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


# -- in requests with several branches

BRANCH_BUGS: dict[str, Patch] = {}


def branch_bug(put_in: Patch) -> Patch:
    BRANCH_BUGS[put_in.__name__] = put_in
    return put_in


for _put_in in (copy_on_write_is_forgotten, branch_holds_nothing, the_last_copy_is_lost, acquire_is_skipped):
    branch_bug(_put_in)


@branch_bug
def branches_draw_with_one_seed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(branches, "branch_seed", lambda seed, branch: seed)


@branch_bug
def branches_draw_from_another_position(patch: pytest.MonkeyPatch) -> None:
    """They join where the row begins, not where it ends."""
    drawing = Branches.drawing
    patch.setattr(Branches, "drawing", lambda self, request, end: drawing(self, request, end + 1))


@branch_bug
def rows_do_not_stop_where_others_join(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Branches, "stop_of", lambda self, request: branches.NO_STOP)


@branch_bug
def joining_branches_take_no_seats(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Running, "num_seats", property(lambda self: len(self.requests)))


@branch_bug
def one_branch_is_preempted_alone(patch: pytest.MonkeyPatch) -> None:
    def pause(self: Branches) -> list[Request]:
        last = [branch for branch in self.open if branch.status is RequestStatus.RUNNING][-1:]
        for branch in last:
            branch.status = RequestStatus.WAITING
        return last

    patch.setattr(Branches, "pause", pause)


@branch_bug
def dropped_beams_keep_their_blocks(patch: pytest.MonkeyPatch) -> None:
    leave = Running.leave

    def forget(self: Running, request: Request) -> None:
        if request.group is not None and request.group.search is not None and not request.group.search.is_over:
            self.requests.remove(request)
        else:
            leave(self, request)

    patch.setattr(Running, "leave", forget)


@branch_bug
def beams_do_not_wait_for_each_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Branches, "has_all_candidates", property(lambda self: bool(self.candidates)))


@branch_bug
def beams_fork_after_their_parent_went_on(patch: pytest.MonkeyPatch) -> None:
    join = Running.join

    def late(self: Running, parent: Request, child: Request) -> None:
        if parent.group is not None and parent.group.search is not None:
            child.token_ids[-1] = (child.token_ids[-1] + 1) % 3
        join(self, parent, child)

    patch.setattr(Running, "join", late)


@branch_bug
def nobody_takes_over_from_an_ended_branch(patch: pytest.MonkeyPatch) -> None:
    forget = Branches.forget
    patch.setattr(Branches, "forget", lambda self, request: forget(self, request) and None)


@branch_bug
def a_stop_ends_all_branches(patch: pytest.MonkeyPatch) -> None:
    finish = EngineCore.finish
    patch.setattr(EngineCore, "finish", lambda self, name, branch=0: self.abort(name) if branch else finish(self, name))


@branch_bug
def an_abort_ends_one_branch(patch: pytest.MonkeyPatch) -> None:
    end = Progress.end
    patch.setattr(
        Progress, "end", lambda self, name, reason, error=None, branch=None: end(self, name, reason, error, 0)
    )


@branch_bug
def room_is_counted_for_one_branch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request_check, "_check_room", lambda *about: None)


@branch_bug
def what_is_saved_is_not_counted_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(branches, "count_blocks", lambda tables: (sum(map(len, tables)), sum(map(len, tables))))


@branch_bug
def one_beam_is_told_twice(patch: pytest.MonkeyPatch) -> None:
    outputs = progress.beam_outputs
    patch.setattr(progress, "beam_outputs", lambda *about: outputs(*about)[:1] * 2)


@pytest.mark.parametrize("name", BRANCH_BUGS)
def test_a_bug_of_branches_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BRANCH_BUGS[name](monkeypatch)
    with pytest.raises((AssertionError, LookupError, ValueError, pytest.fail.Exception)):
        run_branch_storms()


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    with pytest.raises((AssertionError, LookupError, pytest.fail.Exception)):
        run_storms()
