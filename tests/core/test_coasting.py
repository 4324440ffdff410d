"""Rows that are left out change nothing: the same events, decisions and counts as when every row is written out."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from octavo.core.block_manager import BlockManager
from octavo.core.config import SchedulerConfig
from octavo.core.engine_core import EngineCore
from octavo.core.events import Event, RequestFinished
from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import SampledToken, StepPlan, StepResult, TokenLogprob
from octavo.core.step_draft import StepDraft
from octavo.errors import InvalidRequestError

VOCABULARY = 5


def token_of(request_id: str, position: int) -> int:
    return (sum(request_id.encode()) * 7 + position * 3 + position * position) % VOCABULARY


class Counting:
    """Draws a function of name and position; counts what it was given."""

    def __init__(self) -> None:
        self.rows = self.coasting = self.tokens = self.read = 0
        self.sums: list[tuple[int, int]] = []  # of each step: tokens, tokens read

    def execute(self, plan: StepPlan) -> StepResult:
        result = StepResult({}, num_tokens=plan.num_tokens)
        read = plan.coasting.read_tokens
        for row in plan.rows:
            read += row.start + len(row.token_ids)
            samples = [(row.request_id, row.sample)] if row.sample is not None else []
            for name, spec in [*samples, *[(one.request_id, one.sample) for one in row.branch_samples]]:
                result.sampled[name] = SampledToken(token_of(name, spec.position))
                if spec.num_candidates:
                    some = tuple(TokenLogprob(i, -1.0 - i) for i in range(spec.num_candidates))
                    result.candidates[name] = some
        self.rows += len(plan.rows)
        self.coasting += plan.coasting.num_rows
        self.sums.append((plan.num_tokens, read))
        return result

    def drawn(self, request_id: str, position: int, count: int) -> Sequence[int]:
        return [token_of(request_id, position + at) for at in range(count)]


class Case:
    """One core, with what it tells."""

    def __init__(self, config: SchedulerConfig, spec: KVSpec, num_blocks: int, *, may_coast: bool) -> None:
        self.executor = Counting()
        self.blocks = BlockManager(spec, num_blocks, enable_prefix_caching=config.enable_prefix_caching)
        unheard = self.executor if may_coast else None
        self.scheduler = Scheduler(config, self.blocks, vocab_size=1000, unheard=unheard)
        self.core = EngineCore(self.scheduler, self.executor)
        self.events: list[Event] = []
        self.core.add_listener(self.events.append)

    def add(self, name: str, prompt: Sequence[int], params: SamplingParams, priority: int) -> None:
        self.core.add(Request(name, prompt, params, seed=1, eos_token_ids=(0,), priority=priority))

    def offer(self, name: str, prompt: Sequence[int], params: SamplingParams, priority: int) -> bool:
        try:
            self.add(name, prompt, params, priority)
        except InvalidRequestError:
            return False
        return True

    def state(self) -> object:
        """Everything that can be looked at between two steps."""
        running = [
            (one.request_id, one.token_ids.tolist(), one.num_computed_tokens, one.num_accounted_tokens)
            for one in self.scheduler.running
        ]
        return running, self.core.status()


def spec_of(block_size: int, windows: Sequence[int | None]) -> KVSpec:
    groups = [KVGroupSpec(f"group{at}", (at,), 1, 16, "bf16", window=one) for at, one in enumerate(windows)]
    return KVSpec(tuple(groups), block_size)


def params_of(chance: random.Random) -> SamplingParams:
    kind = chance.randrange(10)
    most = chance.randrange(1, 60)
    if kind == 0:
        return SamplingParams(max_tokens=most, n=2, ignore_eos=True)
    if kind == 1:
        return SamplingParams(max_tokens=most, repetition_penalty=1.1, ignore_eos=True)
    if kind == 2:
        return SamplingParams(max_tokens=most)  # may end as "stop": it cannot coast
    return SamplingParams(max_tokens=most, ignore_eos=True)


# Block size, windows, blocks of the pool, seats, tokens of a step, policy, prefix caching.
SHAPES = [
    (16, (None,), 60, 12, 64, "all", True),
    (4, (None,), 24, 6, 12, "all", True),  # preempts all the time
    (8, (None,), 14, 4, 4, "all", True),
    (4, (None,), 30, 6, 12, "all", False),
    (1, (None,), 90, 6, 12, "all", True),
    (4, (None, 6), 60, 6, 12, "all", True),
    (8, (9, None), 40, 6, 20, "all", True),
    (4, (7,), 30, 6, 12, "all", True),
    (4, (None,), 40, 6, 12, "streaming:4,8,4", True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_everything_is_the_same_with_and_without(shape: tuple, seed: int) -> None:
    size, windows, num_blocks, seats, budget, policy, caching = shape
    config = SchedulerConfig(seats, budget, 120, enable_prefix_caching=caching, kv_policy=policy)
    with_, without = (Case(config, spec_of(size, windows), num_blocks, may_coast=on) for on in (True, False))
    chance, added = random.Random(seed), 0
    for _ in range(500):
        act = chance.random()
        if act < 0.18 and added < 60:
            params, urgency = params_of(chance), chance.choice((0, 0, -1))
            head = [1, 2, 3, 4, 1, 2, 3, 4] * chance.randrange(3)
            prompt = [*head, *[chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 20))]]
            fits = [case.offer(f"r{added}", prompt, params, urgency) for case in (with_, without)]
            assert fits[0] == fits[1]
            added += 1
        elif act < 0.21 and added:
            name = f"r{chance.randrange(added)}"
            assert with_.core.abort(name) == without.core.abort(name)
        elif act < 0.24 and added:
            name = f"r{chance.randrange(added)}"
            assert with_.core.finish(name) == without.core.finish(name)
        elif act < 0.27:
            assert with_.state() == without.state()
        elif act < 0.28:
            assert with_.core.reset_prefix_cache() == without.core.reset_prefix_cache()
        else:
            told = {one.request_id: one for one in with_.core.step()}
            whole = {one.request_id: one for one in without.core.step() if one.request_id in told}
            assert told == whole
        assert with_.events == without.events
    assert with_.state() == without.state()
    assert with_.executor.sums == without.executor.sums
    assert without.executor.coasting == 0
    assert with_.executor.rows + with_.executor.coasting == without.executor.rows
    may = size > 1 and policy == "all"
    assert with_.executor.coasting > 100 if may else not with_.executor.coasting


def test_fork_sees_all_tokens_of_a_parent_that_coasts() -> None:
    config = SchedulerConfig(8, 32, 120)
    cases = [Case(config, spec_of(16, (None,)), 40, may_coast=on) for on in (True, False)]
    for case in cases:
        case.add("parent", [1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True), 0)
        for _ in range(6):
            case.core.step()
        child = Request("child", [9], SamplingParams(max_tokens=9, ignore_eos=True), seed=2)
        case.scheduler.fork("parent", child)
        assert child.token_ids.tolist() == [1, 2, 3, *[token_of("parent", at) for at in range(6)]]
        while case.core.has_work:
            case.core.step()
    assert cases[0].events == cases[1].events
    assert cases[0].executor.coasting > 30


def test_most_rows_need_not_be_written() -> None:
    """At block size 16 two of 16 rows are left: the one that fills a block, and the one that begins the next."""
    case = Case(SchedulerConfig(8, 32, 2000), spec_of(16, (None,)), 200, may_coast=True)
    for at in range(4):
        case.add(f"r{at}", [at + 1], SamplingParams(max_tokens=160, ignore_eos=True), 0)
    while case.core.has_work:
        case.core.step()
    assert case.executor.coasting + case.executor.rows == 4 * 160
    assert case.executor.rows <= 4 * (160 / 8 + 3)
    ends = [one.output for one in case.events if isinstance(one, RequestFinished)]
    assert [end.num_output_tokens for end in ends] == [160] * 4


def test_an_error_ends_those_that_coast_with_what_they_had() -> None:
    for may_coast in (True, False):
        case = Case(SchedulerConfig(8, 32, 200), spec_of(16, (None,)), 40, may_coast=may_coast)
        case.add("r", [1], SamplingParams(max_tokens=50, ignore_eos=True), 0)
        for _ in range(9):
            case.core.step()
        (end,) = case.core.fail_all("broken")
        assert (end.finish_reason, end.num_output_tokens) == ("error", 9)
        assert case.core.status().used_blocks == 0
        assert not case.core.has_work


def test_a_journal_needs_every_row() -> None:
    case = Case(SchedulerConfig(8, 32, 200), spec_of(16, (None,)), 40, may_coast=True)
    with pytest.raises(AssertionError, match="every row"):
        case.core.keep_journal(None)  # type: ignore[arg-type]


def test_one_that_is_preempted_gives_its_token_of_the_step_back() -> None:
    case = Case(SchedulerConfig(8, 32, 200), spec_of(16, (None,)), 40, may_coast=True)
    for name in ("first", "last"):
        case.add(name, [1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True), 0)
    for _ in range(5):
        case.core.step()
    coasting, last = case.scheduler._coasting, case.scheduler._running.requests[-1]
    assert coasting.num == 2
    draft = StepDraft(32 - coasting.num)
    case.scheduler._preempt(last, draft)
    assert (coasting.num, draft.budget, draft.preempted) == (1, 31, ["last"])
    assert (last.num_output_tokens, last.num_computed_tokens, last.coasts_until) == (5, 0, 0)
