"""Closed forms of multiply-adds against counting every row and key."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.planner.arithmetic import Work, decode_step
from octavo.planner.cache_bytes import CacheBytes
from octavo.planner.geometry import Geometry, KVGroup, Tensor
from octavo.planner.sources import open_geometry
from octavo.replay.hardware import CATALOGUE, find_hardware

FULL = KVGroup("full", "full", (0, 1), 2, 8, 8)
WINDOW = KVGroup("window-5", "window", (2, 3, 4), 2, 8, 8, window=5)
STATE = KVGroup("state", "state", (5,), state_numbers=64, conv_numbers=12)
CHOSEN = replace(FULL, name="sparse", layer_indices=(6,), read_tokens=7)


def geometry(*groups: KVGroup) -> Geometry:
    tensors = (
        Tensor("model.embed_tokens.weight", (50, 16), role="lookup"),
        Tensor("model.layers.{}.w.weight", (16, 16), (0, 1)),
        Tensor("model.layers.{}.experts.weight", (4, 16), (0, 1), copies=8, used=2),
        Tensor("lm_head.weight", (50, 16)),
    )
    return Geometry("m", "a", "f", "MHA", 7, 16, 4, 50, 1000, "bf16", groups, tensors, score_dim=8, mix_dim=8)


def brute_with_cache(work: Work, prompt: int, output: int) -> int:
    rows = sum(work.per_row + work.attention_row(position + 1) for position in range(prompt + output - 1))
    return rows + output * work.head


def brute_without_cache(work: Work, prompt: int, output: int) -> int:
    total = 0
    for length in range(prompt, prompt + output):
        total += sum(work.per_row + work.attention_row(position + 1) for position in range(length)) + work.head
    return total


@pytest.mark.parametrize("groups", [(FULL,), (WINDOW,), (FULL, WINDOW, STATE), (CHOSEN,)], ids=lambda g: g[0].name)
@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (3, 2), (4, 9), (11, 30), (2, 90), (20, 70)])
def test_multiply_adds_are_those_of_every_row_and_key(groups: tuple[KVGroup, ...], prompt: int, output: int) -> None:
    work = Work(geometry(*groups))
    assert work.with_cache(prompt, output) == brute_with_cache(work, prompt, output)
    assert work.without_cache(prompt, output) == brute_without_cache(work, prompt, output)


def test_a_row_goes_through_the_experts_that_it_takes() -> None:
    work = Work(geometry(FULL))
    assert work.per_row == 2 * 16 * 16 + 2 * 2 * 4 * 16
    assert work.head == 50 * 16
    assert work.attention_row(10) == 2 * 10 * 4 * (8 + 8)


def test_a_decode_step_reads_the_experts_that_its_batch_touches() -> None:
    shape = geometry(FULL)
    cache = CacheBytes(shape.groups, "bf16", "bf16")
    weights_bytes = 2 * shape.parameters
    one, many = (decode_step(shape, cache, weights_bytes, batch, 10) for batch in (1, 1000))
    rest, experts = 2 * (2 * 256 + 800), 2 * 2 * 8 * 64
    assert one.weights_bytes == rest + experts // 4
    assert many.weights_bytes == pytest.approx(rest + experts)
    assert one.kv_bytes == cache.of(10)
    assert many.kv_bytes == 1000 * cache.of(10)
    assert many.intensity > one.intensity


def test_a_tied_head_is_read_and_an_embedding_is_not() -> None:
    untied = geometry(FULL)
    tied = replace(untied, tensors=untied.tensors[:-1])
    cache = CacheBytes(tied.groups, "bf16", "bf16")
    step = decode_step(tied, cache, 2 * tied.parameters, 1, 10)
    assert step.weights_bytes == decode_step(untied, cache, 2 * untied.parameters, 1, 10).weights_bytes


def test_bounds_by_memory_and_by_arithmetic() -> None:
    shape = open_geometry("llama-2-7b")
    cache = CacheBytes(shape.groups, "bf16", "bf16")
    device = find_hardware("A100-80GB")
    small = decode_step(shape, cache, 2 * shape.parameters, 1, 1)
    assert small.seconds(device) == small.bytes_read / device.bytes_per_s
    large = decode_step(shape, cache, 2 * shape.parameters, 1024, 1)
    assert large.seconds(device) == 2 * large.multiply_adds / device.flops_per_s
    assert large.seconds(device, ranks=2) == large.seconds(device) / 2


def test_every_device_has_a_source_and_sane_figures() -> None:
    assert len({device.name for device in CATALOGUE}) == len(CATALOGUE)
    for device in CATALOGUE:
        assert len(device.source) > 10
        assert 10e9 < device.memory_bytes < 1e12
        assert 1e10 < device.bytes_per_s < 1e13
        assert 1e11 <= device.flops_per_s < 1e16
