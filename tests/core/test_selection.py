"""Texts that keep what attention chose: when it is counted and chosen, what is replayed, and what others may find."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from octavo.core import scheduler
from octavo.core.block_manager import BlockManager
from octavo.core.heavy_hitters import HeavyHitters
from octavo.core.keep_policy import KeepPolicy, parse_policy
from octavo.core.kept import Kept
from octavo.core.request import Request
from octavo.core.room import Room
from octavo.core.selection import SelectionPlan
from octavo.core.snap_kv import SnapKV
from octavo.core.step_draft import StepDraft
from octavo.errors import InvalidRequestError
from tests.core.core_harness import Harness
from tests.core.seeded import SeededBugs
from tests.core.storms import storm

SNAP = SnapKV(budget=10, window=3, kernel=1)
HEAVY = HeavyHitters(budget=10, recent=4, piece=6)
PROMPT = [n % 3 for n in range(40)]


@pytest.mark.parametrize("budget", [5, 16])
@pytest.mark.parametrize("piece", [1, 4, 7])
def test_the_plan_of_heavy_hitters_is_what_dropping_one_by_one_gives(budget: int, piece: int) -> None:
    plan = HeavyHitters(budget, 2, piece).plan(4)
    assert plan is not None
    slots = dropped = 0
    drops = []
    for num_computed in range(120):
        assert plan.num_dropped(num_computed) == dropped
        slots += 1
        if slots == budget + piece:
            slots, dropped = budget, dropped + piece
            drops.append(num_computed + 1)
    for num_computed in range(drops[-1]):
        assert plan.next_drop(num_computed) == next(drop for drop in drops if drop > num_computed)
    assert plan.most_slots(0, 100) == budget + piece


def test_the_plan_of_a_prompt_drops_once_at_its_end() -> None:
    plan = SNAP.plan(4, 40)
    assert plan is not None
    assert [plan.num_dropped(n) for n in (0, 39, 40, 41, 200)] == [0, 0, 30, 30, 30]
    assert (plan.next_drop(0), plan.next_drop(39), plan.next_drop(40)) == (40, 40, None)
    assert (plan.most_slots(0, 45), plan.most_slots(0, 90), plan.most_slots(40, 45)) == (40, 60, 15)


@pytest.mark.parametrize(
    ("keep", "num_prompt", "most"), [(SNAP, 10, None), (SNAP, 40, 40), (HEAVY, 40, 16), (HEAVY, 1, 3)]
)
def test_a_text_of_which_nothing_goes_is_an_ordinary_one(keep: KeepPolicy, num_prompt: int, most: int | None) -> None:
    assert keep.plan(4, num_prompt, most) is None
    assert keep.plan(4, 11 if keep is SNAP else num_prompt, 17) is not None


def test_memory_is_that_of_the_prompt_and_then_of_the_budget() -> None:
    harness = Harness(block_size=4, num_blocks=10, budget=7)
    assert harness.add(PROMPT, 40) is None, "whole, it does not fit"
    harness.add(PROMPT, 27, keep=SNAP)
    used = []
    while harness.core.has_work:
        harness.step()
        used.append(harness.core.status().used_blocks)
    assert max(used) == 10
    assert used[-2] == 9, "of 10 + 26 tokens"
    harness.empty()
    small = Harness(block_size=4, num_blocks=4, budget=7)
    small.add(PROMPT, 40, keep=HEAVY)
    small.empty()


def test_a_prompt_stays_findable_and_is_found_up_to_its_window() -> None:
    harness = Harness(block_size=4, num_blocks=40, budget=64)
    for keep, num_hit in ((SNAP, 0), (SNAP, 37), (None, 39), (HEAVY, 0), (replace(SNAP, window=9), 31)):
        name = harness.add(PROMPT, 8, keep=keep)
        harness.drain()
        final = harness.shadows[str(name)].final
        assert final is not None
        assert final.num_cached_tokens == num_hit, keep
    harness.empty()


def test_others_find_of_heavy_hitters_what_was_whole() -> None:
    harness = Harness(block_size=4, num_blocks=40, budget=64)
    harness.add(PROMPT, 8, keep=HEAVY)
    harness.drain()
    name = harness.add(PROMPT, 2)
    harness.drain()
    final = harness.shadows[str(name)].final
    assert final is not None
    assert final.num_cached_tokens == 16
    harness.empty()


@pytest.mark.parametrize(("keep", "num_prompt", "num_blocks"), [(SNAP, 22, 11), (HEAVY, 3, 7), (HEAVY, 3, 10)])
def test_after_a_preemption_it_is_replayed_and_not_chosen_again(
    keep: KeepPolicy, num_prompt: int, num_blocks: int
) -> None:
    """The harness sees to it that each query counts once and each choice is made once."""
    harness = Harness(block_size=4, num_blocks=num_blocks, budget=9)
    harness.add([1] * num_prompt, 30, keep=keep)
    for _ in range(14):
        harness.step()
    harness.add([2] * num_prompt, 30, keep=keep, priority=-1)
    for _ in range(2):
        harness.step()
    harness.add([0] * 5, 30, priority=-2)
    harness.drain()
    assert harness.core.status().preemptions
    again = [c.keep_list for plan in harness.executor.plans for c in plan.compactions]
    assert len(again) > len(set(again)), "nothing was replayed"
    harness.empty()


def test_a_hit_on_the_whole_prompt_after_a_preemption_needs_room_for_what_is_kept() -> None:
    """Its prompt is held by another, so what it keeps takes blocks of its own before it gets a row."""
    for num_blocks in range(12, 24):
        harness = Harness(block_size=4, num_blocks=num_blocks, budget=30, seats=3)
        harness.add(PROMPT, 6)
        harness.add(PROMPT, 12, keep=SNAP, priority=1)
        for _ in range(4):
            harness.step()
        harness.add([2] * 25, 3, priority=-1)
        harness.empty()


@pytest.mark.parametrize(
    ("windows", "params", "words"),
    [
        ((None,), {"best_of": 2, "n": 2}, "n 1"),
        ((None,), {"use_beam_search": True, "best_of": 1}, "beam search"),
        ((None, 5), {}, "windows of its own"),
    ],
)
@pytest.mark.parametrize("keep", [SNAP, HEAVY])
def test_what_cannot_be_had_is_refused(
    keep: KeepPolicy, windows: tuple[int | None, ...], params: dict[str, object], words: str
) -> None:
    harness = Harness(windows=windows)
    with pytest.raises(InvalidRequestError, match=words):
        harness.add(PROMPT, 9, keep=keep, **params)
    assert not harness.core.has_work


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("snapkv", SnapKV()),
        ("snapkv:2048", SnapKV(budget=2048)),
        ("snapkv:256,32,7", SnapKV(256, 32, 7)),
        ("h2o", HeavyHitters()),
        ("h2o:512,256,64", HeavyHitters(512, 256, 64)),
    ],
)
def test_a_policy_is_named_in_a_line(text: str, policy: KeepPolicy) -> None:
    assert parse_policy(text) == policy
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("snapkv:64", "the window of SnapKV is 64; it must be at least 1 and below the budget of 64"),
        ("snapkv:100,10,4", "the kernel of SnapKV is 4; it must be odd"),
        ("h2o:100,100", "the recent tokens of H2O are 100; they must be at least 1 and below"),
        ("h2o:1,2,3,4", "must be all, one of"),
        ("snapkv:", "must be all, one of"),
    ],
)
def test_another_line_is_refused_with_the_range(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_policy(text)


bug = SeededBugs()


def run_storms() -> None:
    for seed in range(12):
        rng = random.Random(seed)
        windows = ((None,), (None, None))[seed % 2]
        harness = Harness(block_size=rng.choice([1, 2]), num_blocks=14, budget=9, windows=windows)
        storm(harness, rng, 60, choosing=True)


def test_without_a_bug_nothing_is_noticed() -> None:
    run_storms()


@bug
def rows_go_beyond_a_drop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SelectionPlan, "next_drop", lambda self, num_computed: None)


@bug
def nothing_is_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler, "is_due", lambda request: False)


@bug
def the_plan_does_not_say_what_moves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepDraft, "add_compaction", lambda self, compaction: None)


@bug
def it_moves_after_all_copies(patch: pytest.MonkeyPatch) -> None:
    add = StepDraft.add_compaction

    def late(self: StepDraft, compaction: object) -> None:
        add(self, compaction)  # type: ignore[arg-type]
        self._compactions[-1] = replace(self._compactions[-1], num_copies_before=10**6)

    patch.setattr(StepDraft, "add_compaction", late)


@bug
def it_is_chosen_again_after_a_preemption(patch: pytest.MonkeyPatch) -> None:
    release = BlockManager.release

    def forget(self: BlockManager, request: Request) -> None:
        release(self, request)
        if request.kept is not None and not request.num_computed_tokens:
            request.kept = Kept(request.kept.drops)

    patch.setattr(BlockManager, "release", forget)


@bug
def another_choice_is_replayed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Kept, "keep_list", lambda self, num_computed: self.keep_lists[0])


@bug
def the_window_comes_from_the_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Kept, "max_hit_tokens", property(lambda self: 10**6))


@bug
def what_has_read_less_is_shared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "num_sharable_tokens", property(lambda self: len(self.token_ids)))


@bug
def a_row_is_not_told_what_is_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("octavo.core.step_draft._dropped", lambda request: (0, 0))


@bug
def the_counts_of_before_are_lost(patch: pytest.MonkeyPatch) -> None:
    weighing = Kept.weighing

    def lose(self: Kept, start: int, end: int) -> object:
        found = weighing(self, start, end)
        return None if found is None else replace(found, mass=b"")

    patch.setattr(Kept, "weighing", lose)


@bug
def room_is_not_kept_for_what_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Room, "_to_keep", lambda self, request: -(10**6))


@pytest.mark.parametrize("name", bug.by_name)
def test_a_bug_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.by_name[name](monkeypatch)
    with pytest.raises((AssertionError, LookupError, pytest.fail.Exception)):
        run_storms()
