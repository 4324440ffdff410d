"""Texts that keep their first and their recent tokens: what leaves, when, what others may find, and what is refused."""

from __future__ import annotations

import random

import pytest

from octavo.core.block_leave import BlockLeave
from octavo.core.block_pool import BlockPool
from octavo.core.keep_policy import parse_policy
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.step_draft import StepDraft
from octavo.core.streaming import DropPlan, StreamingLLM
from octavo.errors import InvalidRequestError
from tests.core.core_harness import Harness
from tests.core.seeded import SeededBugs
from tests.core.storms import storm

KEEP = StreamingLLM(num_sinks=3, num_recent=10, num_dropped_at_once=5)  # in blocks of 4: 4, 12 and 8 tokens


@pytest.mark.parametrize("size", [1, 4, 16])
def test_the_plan_is_what_dropping_one_by_one_gives(size: int) -> None:
    plan = KEEP.plan(size)
    slots = dropped = 0
    drops = []
    for num_computed in range(200):
        assert plan.num_dropped(num_computed) == dropped
        slots += 1
        if slots == plan.capacity:
            slots, dropped = slots - plan.piece, dropped + plan.piece
            drops.append(num_computed + 1)
    for num_computed in range(drops[-1]):
        assert plan.next_drop(num_computed) == next(drop for drop in drops if drop > num_computed)
    assert plan.num_sinks % size == plan.capacity % size == plan.piece % size == 0


def test_a_text_holds_its_capacity_and_no_more() -> None:
    harness = Harness(block_size=4, num_blocks=6, budget=7)
    assert harness.add([1] * 30, 60) is None, "whole, it does not fit"
    harness.add([1] * 30, 60, keep=KEEP)
    most = 0
    while harness.core.has_work:
        harness.step()
        most = max(most, harness.core.status().used_blocks)
    assert most <= KEEP.plan(4).capacity // 4 == 6
    harness.empty()


def test_others_share_the_sinks_and_nothing_else() -> None:
    """What comes later has not seen all before it, or may be dropped: it is nobody's prefix."""
    harness = Harness(block_size=4, num_blocks=40, budget=64)
    prompt = [n % 3 for n in range(40)]
    harness.add(prompt, 8, keep=KEEP)
    harness.drain()
    assert [len(node.key) for node in harness.blocks.tree.nodes()] == [16], "one block of 4 tokens is indexed"
    for keep, hit in ((None, 4), (KEEP, 4)):
        name = harness.add(prompt, 2, keep=keep)
        harness.drain()
        final = harness.shadows[str(name)].final
        assert final is not None
        assert final.num_cached_tokens == hit
    harness.empty()


def test_nobody_waits_for_what_a_text_will_not_share() -> None:
    harness = Harness(block_size=4, num_blocks=40, budget=30)
    prompt = [n % 3 for n in range(40)]
    harness.add(prompt, 8, keep=KEEP)
    harness.add(prompt, 8)
    harness.step()
    assert harness.core.status().waiting == 1, "for the block of the sinks"
    harness.step()
    assert harness.core.status().waiting == 0
    harness.empty()


@pytest.mark.parametrize("num_blocks", [8, 9, 10])
def test_what_is_computed_again_after_a_preemption_drops_the_same(num_blocks: int) -> None:
    """The harness compares every row's drops with its places in the text."""
    harness = Harness(block_size=4, num_blocks=num_blocks, budget=6)
    for n in range(4):
        harness.add([n % 3] * (5 + 3 * n), 50, keep=KEEP)
    harness.drain()
    assert harness.core.status().preemptions
    harness.empty()


@pytest.mark.parametrize(
    ("windows", "params", "words"),
    [
        ((None,), {"best_of": 2, "n": 2}, "n 1"),
        ((None,), {"use_beam_search": True, "best_of": 1}, "beam search"),
        ((None, 5), {}, "windows of its own"),
    ],
)
def test_what_cannot_be_had_is_refused(windows: tuple[int | None, ...], params: dict[str, object], words: str) -> None:
    harness = Harness(windows=windows)
    with pytest.raises(InvalidRequestError, match=words):
        harness.add([1, 2], 2, keep=KEEP, **params)
    assert not harness.core.has_work


@pytest.mark.parametrize("part", ["num_sinks", "num_recent", "num_dropped_at_once"])
def test_a_policy_that_keeps_nothing_is_refused(part: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{part} of StreamingLLM is 0"):
        StreamingLLM(**{part: 0})


bug = SeededBugs()


def run_storms() -> None:
    for seed in range(12):
        rng = random.Random(seed)
        windows = ((None,), (None, None))[seed % 2]
        storm(Harness(block_size=rng.choice([1, 2]), num_blocks=12, budget=9, windows=windows), rng, 60, streaming=True)


def test_without_a_bug_nothing_is_noticed() -> None:
    run_storms()


@bug
def rows_go_beyond_a_drop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DropPlan, "next_drop", lambda self, num_computed: num_computed + 1000)


@bug
def dropped_blocks_leak(patch: pytest.MonkeyPatch) -> None:
    drop = BlockLeave.drop_tokens

    def leak(self: BlockLeave, request: Request) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BlockPool, "release_private", lambda self, block_ids: None)
            drop(self, request)

    patch.setattr(BlockLeave, "drop_tokens", leak)


@bug
def the_sinks_are_dropped(patch: pytest.MonkeyPatch) -> None:
    drop = BlockLeave.drop_tokens

    def drop_first(self: BlockLeave, request: Request) -> None:
        before = [table[:] for table in request.block_tables]
        drop(self, request)
        for table, old in zip(request.block_tables, before, strict=True):
            table[:] = old[len(old) - len(table) :]

    patch.setattr(BlockLeave, "drop_tokens", drop_first)


@bug
def all_that_is_computed_is_shared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "num_sharable_tokens", property(lambda self: len(self.token_ids)))
    patch.setattr("octavo.core.block_manager.min", lambda full, sinks: full, raising=False)


@bug
def a_row_is_not_told_what_is_gone(patch: pytest.MonkeyPatch) -> None:
    add_row = StepDraft.add_row

    def forget(self: StepDraft, request: Request, end: int) -> None:
        drops, request.drops = request.drops, None
        add_row(self, request, end)
        request.drops = drops

    patch.setattr(StepDraft, "add_row", forget)


@bug
def what_was_dropped_is_remembered_after_a_preemption(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def remember(self: Scheduler, request: Request, draft: StepDraft) -> None:
        dropped = request.num_dropped_tokens
        preempt(self, request, draft)
        request.num_dropped_tokens = dropped

    patch.setattr(Scheduler, "_preempt", remember)


@pytest.mark.parametrize("name", bug.by_name)
def test_a_bug_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.by_name[name](monkeypatch)
    with pytest.raises((AssertionError, LookupError, ValueError, pytest.fail.Exception)):
        run_storms()


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("all", None),
        ("streaming", StreamingLLM()),
        ("streaming:8", StreamingLLM(num_sinks=8)),
        ("streaming:4,100,32", StreamingLLM(4, 100, 32)),
    ],
)
def test_a_policy_is_named_in_a_line(text: str, policy: StreamingLLM | None) -> None:
    assert parse_policy(text) == policy
    assert policy is None or parse_policy(str(policy)) == policy


@pytest.mark.parametrize("text", ["", "none", "streaming:", "streaming:0", "streaming:1,2,3,4", "streaming:a", "all:1"])
def test_another_line_is_refused_with_the_range(text: str) -> None:
    with pytest.raises(
        ValueError,
        match="must be all, one of streaming, h2o, snapkv, or one with numbers from 1 on: streaming:SINKS,RECENT,PIECE",
    ):
        parse_policy(text)
