"""The tests of branches are worth something: each of these bugs, put in on purpose, is noticed."""

from __future__ import annotations

import random

import pytest

from octavo.core import branches, progress, request_check
from octavo.core.branches import Branches
from octavo.core.engine_core import EngineCore
from octavo.core.progress import Progress
from octavo.core.request import Request, RequestStatus
from octavo.core.running import Running
from tests.core.core_harness import Harness
from tests.core.seeded import SeededBugs
from tests.core.storms import STORM_WINDOWS, branch_storm
from tests.core.test_seeded_bugs import (
    acquire_is_skipped,
    branch_holds_nothing,
    copy_on_write_is_forgotten,
    the_last_copy_is_lost,
)

branch_bug = SeededBugs()


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
    run_branch_storms()


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


@pytest.mark.parametrize("name", branch_bug.by_name)
def test_a_bug_of_branches_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    branch_bug.by_name[name](monkeypatch)
    with pytest.raises((AssertionError, LookupError, ValueError, pytest.fail.Exception)):
        run_branch_storms()
