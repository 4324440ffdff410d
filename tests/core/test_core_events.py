"""Events describe the cache exactly (F22), and cost nothing when nobody listens."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from octavo.core import block_events, block_manager, events, scheduler
from octavo.core.block_key import BlockKeyChain
from octavo.core.block_manager import BlockManager
from octavo.core.config import SchedulerConfig
from octavo.core.engine_core import EngineCore
from octavo.core.radix_node import GONE
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.testing.checking_executor import CheckingExecutor
from tests.core.core_harness import Harness
from tests.core.group_windows import kv_spec
from tests.core.storms import squeeze, storm


def replay_blocks(told: list[events.Event]) -> tuple[set[int], Counter[int]]:
    """From the events alone: the blocks that can be hit, and how often each block is held."""
    resident: set[int] = set()
    tables: dict[str, list[list[int]]] = {}
    for event in told:
        if isinstance(event, events.PrefixAttached):
            assert event.request_id not in tables
            tables[event.request_id] = [list(table) for table in event.block_tables]
        elif isinstance(event, events.BlocksGrown):
            held = tables.setdefault(event.request_id, [[] for _ in event.block_tables])
            for table, more in zip(held, event.block_tables, strict=True):
                table.extend(more)
        elif isinstance(event, events.BlocksCopied) and event.on_write:
            for table, source, target in zip(tables[event.request_id], event.sources, event.targets, strict=True):
                table[table.index(source)] = target
        elif isinstance(event, events.BlocksCommitted):
            resident.update(block_id for one in (*event.twins, *event.blocks) for block_id in one.block_ids)
            first = event.num_blocks_before
            for index, twin in enumerate(event.twins, first):
                for table, block_id in zip(tables[event.request_id], twin.block_ids, strict=True):
                    table[index] = block_id
        elif isinstance(event, events.BlocksEvicted):
            resident.difference_update(*event.blocks)
        elif isinstance(event, events.BlocksPassed):
            for table, passed in zip(tables[event.request_id], event.block_tables, strict=True):
                first = table.index(passed[0]) if passed else 0
                assert table[first : first + len(passed)] == list(passed)
                assert set(table[:first]) <= {GONE}
                table[first : first + len(passed)] = [GONE] * len(passed)
        elif isinstance(event, events.BlocksDropped):
            for table, dropped in zip(tables[event.request_id], event.block_tables, strict=True):
                assert tuple(table[event.first : event.first + len(dropped)]) == dropped
                del table[event.first : event.first + len(dropped)]
        elif isinstance(event, events.RequestForked):
            tables[event.child_id] = [list(table) for table in event.block_tables]
        elif isinstance(event, events.BlocksReleased):
            assert tables.pop(event.request_id) == [list(table) for table in event.block_tables]
    return resident, Counter(b for held in tables.values() for table in held for b in table if b != GONE)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("windows", "streaming"),
    [((None,), False), ((None, None), False), ((None, 5), False), ((3,), False), ((3, 7), False), ((None, None), True)],
)
def test_f22_replaying_the_events_gives_the_cache_and_every_table(
    seed: int, windows: tuple[int | None, ...], streaming: bool
) -> None:
    rng = random.Random(seed)
    harness = Harness(block_size=2, num_blocks=14, budget=9, seats=4, windows=windows)
    check_structure = harness.check_structure

    def check() -> None:
        check_structure()
        resident, held = replay_blocks(harness.events)
        assert resident == {b for node in harness.blocks.tree.nodes() for b in node.block_ids if b != GONE}
        assert [held[block] for block in range(harness.blocks.pool.num_blocks)] == harness.blocks.pool.ref_count

    harness.check_structure = check  # type: ignore[method-assign]
    storm(harness, rng, 60, streaming=streaming)
    kinds = {type(event).__name__ for event in harness.events}
    expected = {"BlocksCommitted", "BlocksEvicted", "BlocksCopied", "RequestForked", "BlocksReleased"}
    assert expected <= kinds | ({"RequestForked"} if streaming else set())
    assert ("BlocksPassed" in kinds) is any(windows)
    assert ("BlocksDropped" in kinds) is streaming


def test_every_request_has_one_beginning_and_one_end() -> None:
    harness = squeeze(random.Random(0))
    added = Counter(e.request_id for e in harness.events if isinstance(e, events.RequestAdded))
    finished = Counter(e.output.request_id for e in harness.events if isinstance(e, events.RequestFinished))
    assert added == finished == Counter(list(harness.shadows))
    preempted = Counter(e.request_id for e in harness.events if isinstance(e, events.RequestPreempted))
    admitted = Counter(e.request_id for e in harness.events if isinstance(e, events.RequestAdmitted))
    assert preempted.total() > 0
    assert all(admitted[request_id] == 1 + preempted[request_id] for request_id in harness.shadows)
    steps = [event.step_index for event in harness.events if isinstance(event, events.StepStarted)]
    assert steps == list(range(1, len(steps) + 1))


def run_alone(core: EngineCore) -> None:
    for n in range(5):
        core.add(Request(f"r{n}", [1] * 20 + [n], SamplingParams(max_tokens=4), seed=0))
    while core.has_work:
        core.step()
    core.reset_prefix_cache()


def small_core(block_keys: BlockKeyChain | None = None) -> EngineCore:
    blocks = BlockManager(kv_spec(4), 12, block_keys=block_keys)
    return EngineCore(Scheduler(SchedulerConfig(4, 16, 64), blocks), CheckingExecutor(4))


def test_without_listeners_no_event_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoEvents:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"{name} is made for nobody")

    for module in (block_events, block_manager, scheduler):
        monkeypatch.setattr(module, "events", NoEvents())
    monkeypatch.setattr("octavo.core.admission.events", NoEvents())
    run_alone(small_core())


def test_committed_blocks_carry_tokens_and_keys() -> None:
    chain = BlockKeyChain(model_digest="d", kv_format="bf16", block_size=4)
    core = small_core(chain)
    told: list[events.Event] = []
    core.add_listener(told.append)
    run_alone(core)
    key_of: dict[tuple[int, ...], bytes] = {(): chain.root("")}
    committed = [event for event in told if isinstance(event, events.BlocksCommitted)]
    assert committed
    for event in committed:
        above = key_of[event.parent_block_ids]
        for block in (*event.twins, *event.blocks):
            (above,) = chain.extend(above, block.tokens)
            assert block.block_key == above
            key_of[block.block_ids] = above


def test_two_runs_tell_the_same() -> None:
    """Nothing in the core depends on hashes, clocks or identities."""
    runs = []
    for _ in range(2):
        harness = Harness(block_size=2, num_blocks=12, budget=9, seats=4)
        storm(harness, random.Random(3), 80)
        runs.append((harness.events, harness.executor.plans))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("windows", [(None,), (None, 5), (6,)])
def test_nobody_is_told_that_nothing_was_evicted(windows: tuple[int | None, ...]) -> None:
    harness = Harness(block_size=2, num_blocks=14, budget=9, seats=4, windows=windows)
    assert harness.core.reset_prefix_cache() == 0
    storm(harness, random.Random(3), 80)
    while harness.core.reset_prefix_cache():
        pass
    evicted = [event.blocks for event in harness.events if isinstance(event, events.BlocksEvicted)]
    assert evicted
    assert all(any(block_id >= 0 for block_id in ids) for blocks in evicted for ids in blocks)
    assert all(evicted)
