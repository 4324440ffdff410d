"""Windows: what leaves and when, hits at every offset around window and block edges (F8), and that they are useful."""

from __future__ import annotations

import pytest

from octavo.core.block_manager import BlockManager
from octavo.core.config import SchedulerConfig
from octavo.core.engine_core import EngineCore
from octavo.core.kv_groups import LayerGeometry, build_groups
from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.core.radix_node import GONE
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import StepPlan, StepResult
from octavo.testing.checking_executor import CheckingExecutor
from tests.core.core_harness import Harness
from tests.core.group_windows import most_blocks

SIZE = 4
BOTH: list[tuple[int | None, ...]] = [(window,) for window in (1, 2, 4, 5, 6, 9, 13)]
BOTH += [(None, window) for window in (1, 2, 4, 5, 6, 9, 13)] + [(3, None, 10)]
BOTH += [(None, 0), (5, 0, 0)]  # 0: a tail, of which only the block that fills is kept


def text(seed: int, length: int) -> list[int]:
    return [(seed * 31 + i * i) % 3 for i in range(length)]


def hit_of(harness: Harness, prompt: list[int], max_tokens: int = 1) -> int:
    """Run a request to its end; the executor checks each read, the harness each answer."""
    name = harness.add(prompt, max_tokens)
    assert name is not None
    harness.drain()
    final = harness.shadows[name].final
    assert final is not None
    return final.num_cached_tokens


@pytest.mark.parametrize("windows", BOTH)
def test_f8_a_hit_at_every_offset_is_exact_and_full_while_nothing_is_evicted(windows: tuple[int | None, ...]) -> None:
    first = text(1, 41)
    for same in range(41):
        harness = Harness(block_size=SIZE, num_blocks=64, budget=7, windows=windows)
        hit_of(harness, first)
        other = [*first[:same], (first[same] + 1) % 3 if same < 41 else 0, *text(2, 6)]
        assert hit_of(harness, other) == same


@pytest.mark.parametrize("windows", BOTH)
@pytest.mark.parametrize("num_prompt", range(20, 33))
def test_f8_the_next_turn_hits_though_all_that_windows_have_passed_is_gone(
    windows: tuple[int | None, ...], num_prompt: int
) -> None:
    """At every place of the end within a block; what is gone in the middle makes a shorter hit, never a lie."""
    harness = Harness(block_size=SIZE, num_blocks=64, budget=7, windows=windows)
    prompt = text(3, num_prompt)
    hit_of(harness, prompt, max_tokens=9)
    talk = prompt + harness.shadows["r0"].output
    evict_passed(harness.blocks)
    full = (len(talk) - 1) // SIZE * SIZE
    assert hit_of(harness, [*talk, *text(4, 5)]) == full, "the next turn"
    evict_passed(harness.blocks)
    for same in range(len(talk)):
        other = [*talk[:same], (talk[same] + 1) % 3, 1]
        assert hit_of(harness, other) <= same
    harness.empty()


@pytest.mark.parametrize("windows", BOTH)
@pytest.mark.parametrize("num_prompt", range(20, 28))
def test_another_answer_to_the_same_prompt_hits(windows: tuple[int | None, ...], num_prompt: int) -> None:
    harness = Harness(block_size=SIZE, num_blocks=64, budget=7, windows=windows)
    prompt = text(5, num_prompt)
    hit_of(harness, prompt, max_tokens=30)
    evict_passed(harness.blocks)
    assert hit_of(harness, prompt) >= (num_prompt - 1) // SIZE * SIZE
    evict_passed(harness.blocks)
    assert hit_of(harness, [*prompt, 2, 2, 2]) >= num_prompt // SIZE * SIZE


@pytest.mark.parametrize("windows", BOTH)
def test_where_texts_have_parted_before_others_hit(windows: tuple[int | None, ...]) -> None:
    """A system prompt that two have had: its window stays when what was passed is evicted, and a third one hits."""
    harness = Harness(block_size=SIZE, num_blocks=64, budget=7, windows=windows)
    system = text(6, 24)
    for tail in ([0] * 15, [1] * 15):
        hit_of(harness, system + tail, max_tokens=3)
    evict_passed(harness.blocks)
    assert hit_of(harness, [*system, *[2] * 9]) >= len(system)


@pytest.mark.parametrize("windows", [(None, 5), (None, 13), (6,), (3, None, 10)])
def test_who_waits_for_a_prefix_finds_its_window(windows: tuple[int | None, ...]) -> None:
    """What is passed is evicted at once, but for where the one that waits parts from the one that computes."""
    harness = Harness(block_size=SIZE, num_blocks=60, budget=75, windows=windows)
    first = text(20, 70)
    harness.add(first, 8)
    name = harness.add([*first[:40], (first[40] + 1) % 3, *text(21, 9)], 2)
    harness.step()
    assert harness.core.status().waiting == 1
    evict_passed(harness.blocks)
    harness.drain()
    final = harness.shadows[str(name)].final
    assert final is not None
    assert final.num_cached_tokens == 40


def evict_passed(blocks: BlockManager) -> None:
    """All that windows have passed, and nothing else."""
    blocks.supply.evict(len(blocks.pool.idle._passed))  # type: ignore[attr-defined]


def test_what_windows_have_passed_goes_before_older_blocks() -> None:
    harness = Harness(block_size=SIZE, num_blocks=64, budget=8, windows=(None, 5))
    hit_of(harness, old := text(7, 12))
    hit_of(harness, text(8, 40), max_tokens=12)
    num_passed = len(harness.blocks.pool.idle._passed)  # type: ignore[attr-defined]
    assert num_passed > 4
    harness.blocks.supply.evict(num_passed)
    assert hit_of(harness, old) == 11
    status = harness.core.status().kv_group_blocks
    assert status[1].cached < status[0].cached


def test_a_window_holds_no_more_however_long_the_talk() -> None:
    harness = Harness(block_size=SIZE, num_blocks=64, budget=8, windows=(None, 9))
    harness.add(text(9, 30), 100)
    most = 0
    while harness.core.has_work:
        harness.step()
        used = harness.core.status().kv_group_blocks
        running = harness.scheduler.running
        if running:
            assert used[0].used == -(-running[0].num_computed_tokens // SIZE)
            most = max(most, used[1].used)
    assert most == 3
    harness.empty()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9, 16, 17, 33])
@pytest.mark.parametrize("step", [1, 2, 3, 7, 16])
def test_the_most_blocks_are_what_the_worst_schedule_holds(size: int, window: int, step: int) -> None:
    """Against every place where a step may begin: exact for long texts, and never too little."""
    group = KVGroupSpec("w", (0,), 1, 16, "bf16", window=window)
    longest = window + step + 3 * size
    for num_tokens in (1, 2, size, size + 1, window, longest):
        worst = 0
        for start in range(num_tokens):
            end = min(num_tokens, start + step)
            keeps = max(0, start // size * size - window + 1) // size  # of the row at the last block's edge
            first = max(0, min(keeps, start // size - 1))
            worst = max(worst, -(-end // size) - first)
        most = group.blocks_for_tokens(num_tokens, size, step)
        assert worst <= most
        assert most == sum(most_blocks((window,), size, num_tokens, step))
        assert num_tokens < longest or worst == most


GEMMA_3_270M = [LayerGeometry(1, 256, "bf16", None if i % 6 == 5 else 512) for i in range(18)]


class Watch:
    """Between core and executor: bytes held in a step, by group."""

    def __init__(self, executor: CheckingExecutor) -> None:
        self.executor = executor
        self.held: list[list[int]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        (row,) = plan.rows
        self.held.append([sum(block != GONE for block in table) for table in row.block_tables])
        return self.executor.execute(plan)


def test_gemma_3_270m_at_8192_tokens_holds_what_the_plan_says() -> None:
    """Between steps full layers and 512 + two blocks of window layers, in prefill the chunk more, to the byte."""
    groups = build_groups(GEMMA_3_270M)
    spec = KVSpec(groups, 16)
    layer_bytes = 2 * 256 * 2  # of a token
    assert [len(group.layer_indices) for group in groups] == [3] * 6
    assert spec.padding_bytes_per_block == 0
    assert spec.bytes_per_block == 3 * layer_bytes * 16
    chunk, num_prompt, total = 512, 8150, 8192
    num_blocks = spec.blocks_for_tokens(total, chunk)
    blocks = BlockManager(spec, num_blocks)
    watch = Watch(CheckingExecutor(16, windows=[group.window for group in groups], keep_plans=False))
    core = EngineCore(Scheduler(SchedulerConfig(4, chunk, total), blocks), watch)
    core.add(Request("r", text(1, num_prompt), SamplingParams(max_tokens=total - num_prompt, temperature=0.0), seed=0))
    between = 0
    while core.has_work:
        core.step()
        status = core.status()
        full, *windows = [group.used for group in status.kv_group_blocks]
        between = max(between, full + sum(windows))
        assert all(one <= 512 // 16 + 2 for one in windows)
        assert status.used_blocks * spec.bytes_per_block <= spec.pool_bytes(spec.blocks_for_tokens(total))
    full_bytes, window_bytes = 3 * layer_bytes * total, 15 * layer_bytes
    assert spec.pool_bytes(between) <= full_bytes + window_bytes * (512 + 2 * 16)
    assert spec.pool_bytes(max(map(sum, watch.held))) <= spec.pool_bytes(num_blocks)
    assert spec.pool_bytes(num_blocks) <= full_bytes + window_bytes * (512 + chunk + 2 * 16)
    assert spec.pool_bytes(between) == spec.pool_bytes(spec.blocks_for_tokens(total)), "the plan is what is held"
    everything = KVSpec(build_groups([LayerGeometry(1, 256, "bf16")] * 18), 16).blocks_for_tokens(total) * 18 // 3
    assert between * 3 < everything
