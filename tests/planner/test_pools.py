"""Blocks of engines: octavo's against its own KV spec, others against their rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.kv_bytes import FORMAT_BYTES
from octavo.core.kv_groups import LayerGeometry, build_groups
from octavo.core.kv_spec import KVSpec
from octavo.errors import ConfigError
from octavo.planner.cache_bytes import FORMATS, CacheBytes, entry_bytes, sharded
from octavo.planner.geometry import KVGroup
from octavo.planner.pools import ENGINES, PoolOptions, llamacpp_bytes, make_pool, sglang_tokens

FULL = KVGroup("full", "full", (0, 1, 2, 3), 2, 8, 8)
WINDOW = replace(FULL, name="window-32", kind="window", layer_indices=(4, 5), window=32)
STATE = KVGroup("state", "state", (6, 7, 8), state_numbers=512, conv_numbers=48)


def options(**changes: object) -> PoolOptions:
    return replace(PoolOptions("bf16", "bf16", 16, 4096), **changes)  # type: ignore[arg-type]


@settings(deadline=None)
@given(
    layers=st.integers(1, 100),
    heads=st.integers(1, 64),
    head_dim=st.integers(1, 8).map(lambda n: 32 * n),
    kv_format=st.sampled_from(sorted(FORMAT_BYTES)),
    block_size=st.integers(1, 16).map(lambda n: 16 * n),
    budget=st.integers(1, 1 << 40),
)
def test_octavos_pool_is_its_kv_spec(
    layers: int, heads: int, head_dim: int, kv_format: str, block_size: int, budget: int
) -> None:
    """Law 2: the planner's bytes of a token, of a block and of a pool are those that the engine allocates by."""
    group = KVGroup("full", "full", tuple(range(layers)), heads, head_dim, head_dim)
    spec = KVSpec(build_groups([LayerGeometry(heads, head_dim, kv_format)] * layers), block_size)
    pool = make_pool("octavo", (group,), options(kv_format=kv_format, block_size=block_size))
    assert CacheBytes((group,), kv_format, "bf16").bytes_per_token == spec.bytes_per_token
    assert pool.bytes_per_block == spec.bytes_per_block
    count = pool.num_blocks(budget)
    if count:
        assert count == spec.num_blocks(budget)
        limit = count * block_size
        assert pool.longest_tokens(count, 512, limit) == spec.longest_tokens(count, 512, limit)
        assert len(spec.groups) > 1 or pool.tokens(count) == count * block_size
    for tokens in (1, block_size, block_size + 1, 1000):
        assert pool.blocks_for(tokens) == spec.blocks_for_tokens(tokens)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4), st.sampled_from([8, 16, 24])), min_size=1, max_size=3))
def test_blocks_hold_what_each_group_puts_into_them(shapes: list[tuple[int, int, int]]) -> None:
    groups, start = [], 0
    for index, (layers, heads, dim) in enumerate(shapes):
        window = None if index == 0 else 32 * index
        kind = "full" if window is None else "window"
        indices = tuple(range(start, start + layers))
        groups.append(KVGroup(f"{kind}-{window}", kind, indices, heads, dim, dim, window=window))
        start += layers
    pool = make_pool("octavo", tuple(groups), options())
    for part, group in zip(pool.parts, groups, strict=True):
        assert part.block_bytes <= pool.bytes_per_block
        assert part.layers * part.count >= group.num_layers
        assert part.block_bytes == part.layers * entry_bytes(group, "bf16") * 16


def test_layers_of_one_geometry_fill_blocks_without_padding() -> None:
    pool = make_pool("octavo", (FULL, WINDOW), options())
    assert [(part.layers, part.count) for part in pool.parts] == [(2, 2), (2, 1)]
    assert pool.bytes_per_block == 2 * 16 * 64
    assert pool.blocks_for(16) == 3
    assert pool.blocks_for(1600) == 2 * 100 + 3  # a window of 32 may lie in three blocks


def test_windows_of_vllm_keep_a_step_more() -> None:
    pool = make_pool("vllm", (FULL, replace(WINDOW, layer_indices=(4, 5, 6, 7))), options())
    assert pool.bytes_per_block == 4 * 16 * 64
    assert pool.blocks_for(4096) == 256 + -(-(31 + 2048) // 16) + 1


def test_states_raise_the_block_size_of_vllm() -> None:
    pool = make_pool("vllm", (FULL, STATE), options())
    state = 4 * 512 + 2 * 48
    assert pool.block_size == -(-state // (64 * 16)) * 16
    assert pool.bytes_per_block == pool.block_size * 64 * 3
    assert [part.count for part in pool.parts] == [2, 1]
    keeping = make_pool("vllm", (FULL, STATE), options(keeps_states=True))
    assert keeping.blocks_for(1) == pool.blocks_for(1) + 1


def test_sglang_counts_tokens() -> None:
    assert sglang_tokens((FULL,), options(), 10_000) == 10_000 // 256
    assert sglang_tokens((FULL, WINDOW), options(), 358_400) == int(358_400 / (256 + 0.8 * 128))


def test_llamacpp_allocates_at_once() -> None:
    assert llamacpp_bytes((FULL,), options(), 1000, 3) == 3000 * 256
    assert llamacpp_bytes((WINDOW,), options(), 4096, 1) == 768 * 128  # 32 + 512, in steps of 256
    assert llamacpp_bytes((STATE,), options(), 4096, 2) == 2 * 3 * 4 * (512 + 48)


def test_unknown_engines_and_empty_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="magic"):
        make_pool("magic", (FULL,), options())
    for engine in ENGINES:
        with pytest.raises(ConfigError, match="keeps nothing"):
            make_pool(engine, (), options())


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_ranks_split_heads_and_copy_them_where_there_are_too_few(ranks: int, heads: int) -> None:
    group = sharded(replace(FULL, num_kv_heads=8), ranks)
    assert group.num_kv_heads == heads
    latent = KVGroup("latent", "latent", (0,), 1, 576)
    assert sharded(latent, ranks) == latent


def test_formats_with_blocks_pad_a_vector_to_whole_blocks() -> None:
    assert entry_bytes(KVGroup("full", "full", (0,), 1, 48, 48), "q8_0") == 2 * 2 * 34
    for name, each in FORMAT_BYTES.items():
        assert [stored.of(64) for stored in FORMATS[name]] == [each.k.of(64), each.v.of(64)]


@settings(deadline=None)
@given(st.integers(1, 1 << 40), st.integers(1, 64))
def test_the_crossover_is_the_least_length_that_reaches(num_bytes: int, sequences: int) -> None:
    cache = CacheBytes((FULL, WINDOW, STATE), "bf16", "bf16")
    found = cache.tokens_for(num_bytes, sequences)
    assert found is not None
    assert cache.of(found, sequences) >= num_bytes
    assert found == 1 or cache.of(found - 1, sequences) < num_bytes


def test_windows_alone_may_never_reach_the_weights() -> None:
    assert CacheBytes((WINDOW,), "bf16", "bf16").tokens_for(1 << 40) is None
    assert CacheBytes((STATE,), "bf16", "bf16").tokens_for(1 << 40) is None
    assert CacheBytes((WINDOW,), "bf16", "bf16").tokens_for(32 * 128) == 32


def test_states_take_whole_blocks_of_a_sequence() -> None:
    pool = make_pool("octavo", (FULL, STATE), options())
    assert pool.bytes_per_block == 4 * 16 * 64
    state = 3 * (4 * 512 + 2 * 48)
    assert pool.blocks_for(1) == 1 + -(-state // pool.bytes_per_block)
    assert make_pool("octavo", (STATE,), options()).blocks_for(10**6) == 1


def test_index_keys_lie_with_the_latents_that_they_choose() -> None:
    latent = KVGroup("latent", "latent", (0, 1), 1, 64)
    index = KVGroup("index", "index", (0, 1), index_dim=128, index_heads=4)
    pool = make_pool("octavo", (latent, index), options())
    assert (pool.num_tables, pool.bytes_per_block) == (1, 16 * 2 * (2 * 64 + 132))


def test_a_little_padding_is_taken_for_fewer_tables() -> None:
    """31 layers of one kind and 30 of another, narrower one: two tables of almost equal blocks, not sixty-one."""
    wide = KVGroup("full", "full", tuple(range(31)), 2, 64, 64)
    local = KVGroup("window-32", "window", tuple(range(31, 61)), 2, 64, 64, window=32)
    pool = make_pool("octavo", (wide, local), options())
    assert [(part.layers, part.count) for part in pool.parts] == [(31, 1), (30, 1)]
    far = make_pool("octavo", (wide, replace(local, layer_indices=(31, 32))), options())
    assert far.num_tables > 2


def test_the_longest_text_of_windows_counts_a_step_more() -> None:
    pool = make_pool("octavo", (WINDOW,), options())
    assert pool.longest_tokens(100, 512, 5000) == 5000
    assert pool.longest_tokens(20, 512, 5000) == 20 * 16
    both = make_pool("octavo", (FULL, WINDOW), options())
    longest = both.longest_tokens(200, 512, 10**6)
    assert both.parts[0].count * (longest // 16) + min(longest // 16, 2 + 33) <= 200
    assert both.parts[0].count * (longest // 16 + 1) + min(longest // 16 + 1, 2 + 33) > 200
