"""The pool: bytes of the buffer equal the plan (law 2), layers tile a block exactly, memory comes as it is used."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.errors import MemoryBudgetError
from octavo.executor import kv_storage
from octavo.executor.kv_storage import KVStorage
from octavo.kv_formats import layout


def make_spec(
    num_layers: int = 3, kv_format: str = "bf16", block_size: int = 16, heads: int = 2, dim: int = 16
) -> KVSpec:
    return KVSpec((KVGroupSpec("full", tuple(range(num_layers)), heads, dim, kv_format),), block_size)


@given(
    st.integers(1, 6),
    st.sampled_from(["f32", "bf16"]),
    st.sampled_from([16, 32, 64]),
    st.integers(1, 4),
    st.sampled_from([16, 48, 64]),
    st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_allocated_bytes_are_the_plans_and_layers_tile_the_block(
    num_layers: int, kv_format: str, block_size: int, heads: int, dim: int, num_blocks: int
) -> None:
    spec = make_spec(num_layers, kv_format, block_size, heads, dim)
    storage = KVStorage(spec, num_blocks)
    item_bytes = {"f32": 4, "bf16": 2}[kv_format]
    by_hand = num_blocks * num_layers * block_size * heads * dim * 2 * item_bytes
    assert storage.allocated_bytes == storage.pool.nbytes == len(memoryview(storage.pool)) == by_hand
    assert spec.pool_bytes(num_blocks) == by_hand
    layer_bytes = spec.bytes_per_block // num_layers
    assert [layer.layer_offset for layer in storage.layers] == [i * layer_bytes for i in range(num_layers)]
    assert all(layer.pool is storage.pool for layer in storage.layers)
    assert all(layer.block_bytes == spec.bytes_per_block for layer in storage.layers)


@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
@pytest.mark.parametrize("block_size", [16, 32])
def test_every_slot_of_every_layer_has_bytes_of_its_own(kv_format: str, block_size: int) -> None:
    storage = KVStorage(make_spec(2, kv_format, block_size), 2, fill_with_nan=True)
    values = iter(range(1, 10**6))
    written = {}
    for index, layer in enumerate(storage.layers):
        for position in range(2 * block_size):
            k = np.full((2, 16), next(values) % 250, np.float32)
            v = np.full((2, 16), next(values) % 250, np.float32)
            layout.write_token(layer, position // block_size, position % block_size, k, v)
            written[index, position] = (k, v)
    table = np.array([0, 1], np.int32)
    for index, layer in enumerate(storage.layers):
        k, v = layout.read_tokens(layer, table, 2 * block_size)
        for position in range(2 * block_size):
            assert (k[:, position] == written[index, position][0]).all()
            assert (v[:, position] == written[index, position][1]).all()


@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
def test_nan_fill(kv_format: str) -> None:
    storage = KVStorage(make_spec(2, kv_format), 3, fill_with_nan=True)
    table = np.array([0, 1, 2], np.int32)
    assert all(np.isnan(part).all() for layer in storage.layers for part in layout.read_tokens(layer, table, 48))
    storage.pool.fill(0)
    storage.fill_block_with_nan(1)
    k, v = layout.read_tokens(storage.layers[1], table, 48)
    assert np.isnan(k[:, 16:32]).all()
    assert np.isnan(v[:, 16:32]).all()
    assert not np.isnan(np.delete(k, range(16, 32), axis=1)).any()


def test_the_pool_is_aligned_and_starts_at_zero() -> None:
    storage = KVStorage(make_spec(), 5)
    assert storage.pool.ctypes.data % 64 == 0
    assert not storage.pool.any()


def test_memory_comes_as_blocks_are_written(resident_bytes) -> None:  # type: ignore[no-untyped-def]
    spec = make_spec(num_layers=16, heads=8, dim=64)
    num_blocks = (512 << 20) // spec.bytes_per_block
    before = resident_bytes()
    storage = KVStorage(spec, num_blocks)
    assert resident_bytes() - before < 16 << 20
    storage.pool[: 64 << 20] = 1
    grown = resident_bytes() - before
    assert 60 << 20 < grown < 96 << 20


def test_a_pool_without_address_space_is_refused_with_the_cure() -> None:
    with pytest.raises(MemoryBudgetError, match="--kv-cache-memory"):
        KVStorage(make_spec(), 1 << 52)


def test_a_budget_below_one_block_is_refused() -> None:
    spec = make_spec()
    with pytest.raises(MemoryBudgetError, match=str(spec.bytes_per_block)):
        spec.num_blocks(spec.bytes_per_block - 1)


def resident_bytes(storage: KVStorage) -> int:
    """Of the pool, by the kernel's own account of its pages."""
    first, last = storage.pool.ctypes.data, storage.pool.ctypes.data + storage.allocated_bytes
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        place = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if place:
            inside = int(place[1], 16) < last and int(place[2], 16) > first
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the account of pages is Linux's")
def test_an_idle_engine_has_memory_ready_a_part_at_a_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_storage, "_AHEAD_BYTES", 16 << 20)
    spec = make_spec(num_layers=8, heads=8, dim=128)
    num_blocks = (64 << 20) // spec.bytes_per_block
    storage = KVStorage(spec, num_blocks)
    storage.pool[: 1 << 20] = 7
    steps = 1
    while storage.prepare():
        steps += 1
    if steps == 1:
        pytest.skip("this kernel cannot populate pages")
    assert steps == 8, "2 MiB at a time"
    ready = resident_bytes(storage)
    assert 16 << 20 <= ready <= 20 << 20
    assert not storage.prepare(), "and then no more"
    assert resident_bytes(storage) == ready
    storage.mark_used((8 << 20) // spec.bytes_per_block)
    assert storage.prepare(), "blocks were used: as much behind them"
    storage.mark_used(num_blocks - 1)
    storage.mark_used(0)
    while storage.prepare():
        pass
    assert resident_bytes(storage) >= storage.allocated_bytes
    assert (storage.pool[: 1 << 20] == 7).all(), "no byte changes"
    assert not storage.pool[1 << 20 :].any()


def test_a_system_that_cannot_prepare_memory_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_storage, "_POPULATE_WRITE", 9999)
    storage = KVStorage(make_spec(), 100)
    assert not storage.prepare()
    assert not storage.prepare()
    assert not storage.pool.any()
