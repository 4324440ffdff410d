"""The plan: what a budget holds, what is refused with its arithmetic, and what is lowered and says so."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.kv_groups import LayerGeometry, build_groups
from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.errors import MemoryBudgetError
from octavo.executor.kv_storage import KVStorage
from octavo.executor.plan import CachePlan, plan_cache

SPEC = KVSpec((KVGroupSpec("full", (0, 1), 2, 16, "bf16"),), 16)
BLOCK = 2 * 2 * 2 * 16 * 2 * 16  # layers x (K, V) x heads x head_dim x bytes x tokens
GIB = 1 << 30


def plan(budget: int | None, asked: int | None = None, *, context: int = 1024, available: int = 64 * GIB) -> CachePlan:
    return plan_cache(
        SPEC, budget_bytes=budget, available_bytes=available, asked_model_len=asked, longest_context=context
    )


def test_a_budget_buys_whole_blocks() -> None:
    made = plan(100 * BLOCK + BLOCK - 1, 64)
    assert (made.num_blocks, made.kv_bytes, made.kv_tokens, made.max_model_len) == (100, 100 * BLOCK, 1600, 64)
    assert made.max_concurrency == 25.0
    assert made.degraded == ()


def test_the_boot_line_says_blocks_tokens_bytes_and_concurrency() -> None:
    assert str(plan(100 * BLOCK, 64)) == (
        f"KV cache: 100 blocks x 16 = 1600 tokens ({100 * BLOCK} bytes), maximum concurrency for 64 tokens per "
        "request: 25.00x"
    )


def test_without_a_length_the_models_own_is_taken() -> None:
    assert plan(None).max_model_len == 1024
    assert plan(64 * BLOCK).max_model_len == 1024


def test_a_length_that_does_not_fit_is_refused_when_it_was_asked_for() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        plan(10 * BLOCK, 161)
    message = str(caught.value)
    for part in ("161 tokens needs 11 blocks", "has 10 blocks", f"at least {11 * BLOCK}", "at most 160"):
        assert part in message
    assert plan(10 * BLOCK, 160).max_model_len == 160


def test_a_length_that_does_not_fit_is_lowered_and_told_when_it_was_not_asked_for() -> None:
    made = plan(10 * BLOCK)
    assert made.max_model_len == 160
    (told,) = made.degraded
    assert "160 instead of the model's 1024" in told
    assert "64 blocks" in told


def test_a_budget_below_one_block_or_above_the_memory_is_refused() -> None:
    with pytest.raises(MemoryBudgetError, match=f"one block of 16 tokens has {BLOCK} bytes"):
        plan(BLOCK - 1)
    with pytest.raises(MemoryBudgetError, match=f"given {GIB + 1} bytes, but {GIB} bytes"):
        plan(GIB + 1, available=GIB)


def test_the_default_is_half_of_what_is_there_up_to_4_gib() -> None:
    assert plan(None, available=GIB).num_blocks == GIB // 2 // BLOCK
    assert plan(None).num_blocks == 4 * GIB // BLOCK
    assert (
        plan(None, context=3 * GIB // BLOCK * 2 * 16).max_model_len == 3 * GIB // BLOCK * 2 * 16
    )  # 6 GiB: one request


FULL, WINDOW = LayerGeometry(2, 16, "bf16"), LayerGeometry(2, 16, "bf16", window=64)
LAYER = BLOCK // 2  # bytes of a block of one layer


def window_plan(layers: list[LayerGeometry], num_blocks: int, asked: int | None = None, *, step: int = 32) -> CachePlan:
    spec = KVSpec(build_groups(layers), 16)
    return plan_cache(
        spec,
        budget_bytes=spec.pool_bytes(num_blocks),
        available_bytes=GIB,
        asked_model_len=asked,
        longest_context=4096,
        step_tokens=step,
    )


def test_window_layers_take_their_window_and_a_step() -> None:
    """A group of each kind: 256 blocks of the full layer, 4 + 3 of the window's while a step computes 32 tokens."""
    made = window_plan([FULL, WINDOW], 256 + 7)
    assert (made.max_model_len, made.kv_tokens, made.degraded) == (4096, 4096, ())
    assert made.kv_bytes == (256 + 7) * LAYER
    assert made.max_concurrency == 1.0
    assert window_plan([FULL, WINDOW], 2 * (256 + 5) + 2).max_concurrency == 2.0
    short = window_plan([FULL, WINDOW], 256 + 6)
    assert short.max_model_len == 4080
    (told,) = short.degraded
    assert "one request of 4096 tokens needs 263 blocks" in told


def test_windows_alone_hold_a_text_of_any_length() -> None:
    made = window_plan([WINDOW] * 3, 7)
    assert (made.max_model_len, made.kv_tokens, made.kv_bytes) == (4096, 4096, 7 * 3 * LAYER)
    assert window_plan([WINDOW] * 3, 6).max_model_len == 96
    with pytest.raises(MemoryBudgetError, match="97 tokens needs 7 blocks"):
        window_plan([WINDOW] * 3, 6, 97)


def test_the_boot_line_tells_of_groups_and_padding() -> None:
    assert "KV cache: 300 blocks x 16 in 2 KV groups, 1 with a window = 4688 tokens" in str(
        window_plan([FULL, WINDOW], 300)
    )
    assert "7 blocks x 16 in 1 KV group with a window = 4096 tokens" in str(window_plan([WINDOW], 7))
    thin = LayerGeometry(2, 48, "bf16", window=64)
    made = window_plan([LayerGeometry(2, 64, "bf16"), thin, thin], 900)
    assert "in 3 KV groups, 2 with a window, 16.7% padding =" in str(made)


@given(st.integers(1, 4), st.sampled_from([16, 32]), st.integers(1, 50), st.integers(1, 900))
@settings(max_examples=60, deadline=None)
def test_what_is_planned_is_what_is_allocated(layers: int, block_size: int, blocks: int, spare: int) -> None:
    spec = KVSpec((KVGroupSpec("full", tuple(range(layers)), 1, 16, "bf16"),), block_size)
    made = plan_cache(
        spec,
        budget_bytes=spec.pool_bytes(blocks) + spare,
        available_bytes=GIB,
        asked_model_len=None,
        longest_context=256,
    )
    storage = KVStorage(made.spec, made.num_blocks)
    assert storage.allocated_bytes == storage.pool.nbytes == made.kv_bytes
    assert made.kv_bytes <= spec.pool_bytes(blocks) + spare
    assert spec.blocks_for_tokens(made.max_model_len) <= made.num_blocks


def test_a_policy_that_drops_tokens_bounds_what_a_request_needs() -> None:
    """320 slots are 20 blocks, whatever the length; with fewer the length is what they hold."""
    common = {"available_bytes": GIB, "asked_model_len": None, "longest_context": 4096, "most_slots": 320}
    made = plan_cache(SPEC, budget_bytes=40 * BLOCK, **common)  # type: ignore[arg-type]
    assert (made.max_model_len, made.max_request_tokens, made.max_concurrency) == (4096, 4096, 2.0)
    tight = plan_cache(SPEC, budget_bytes=19 * BLOCK, **common)  # type: ignore[arg-type]
    assert (tight.max_model_len, tight.max_request_tokens) == (304, 304)
    assert plan(10 * BLOCK).max_request_tokens == 160


def test_tails_are_counted_and_said() -> None:
    """Keys of int4 wait for their tile in blocks of their own: one a sequence, as many as a step has while it runs."""
    spec = KVSpec(build_groups([LayerGeometry(3, 64, "int4")] * 30), 16)
    made = plan_cache(
        spec,
        budget_bytes=200 * spec.bytes_per_block,
        available_bytes=64 * GIB,
        asked_model_len=1024,
        longest_context=8192,
        step_tokens=64,
    )
    assert made.kv_bytes == 200 * spec.bytes_per_block == KVStorage(spec, 200).allocated_bytes
    assert made.kv_tokens == (200 - 2 * 5) * 16  # a step of 64 tokens may touch five blocks
    assert "200 blocks x 16 in 3 KV groups, 2 for blocks that fill = " in str(made)
    assert made.max_concurrency == (200 - 2 * 4) / (64 + 2)
