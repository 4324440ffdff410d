"""The instruments of the law-1 tests: seeded faults are seen, and counts equal what the kernels processed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.kernels.decoder_layer import run_layers
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import (
    F32,
    F64,
    I32,
    U8,
    AttentionBatch,
    AttentionProjection,
    DecoderLayer,
    DecoderRows,
    KVLayer,
    Ops,
    PackedLinear,
    RopeTable,
)
from octavo.kv_formats import layout
from octavo.models.loader import CausalLM, load_model, open_model
from tests.e2e import law1_cases as cases
from tests.e2e.law1_engine import Engine, fill_slots_with_nan
from tests.models.tiny_models import make_tiny_model

PROMPT = cases.other_ids(99, 100, 300)


class WrappedOps:
    """Passes every operation on; counts the rows whose K and V are written, and the copies."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.num_written = 0
        self.num_copied = 0
        self.loses_copies = False
        self.forgets_to_write = -1  # position
        self.breaks = False

    def pack_linear(self, weight: F32, bias: F32 | None, weights_dtype: str) -> PackedLinear:
        return self.ops.pack_linear(weight, bias, weights_dtype)

    def pack_blocks(self, blocks: U8, bias: F32 | None, kind: str) -> PackedLinear:
        return self.ops.pack_blocks(blocks, bias, kind)

    def linear(self, x: F32, weight: PackedLinear, out: F32, *, accumulate: bool = False) -> None:
        self.ops.linear(x, weight, out, accumulate=accumulate)

    def embedding(self, table: PackedLinear, token_ids: I32, out: F32) -> None:
        self.ops.embedding(table, token_ids, out)

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32, *, accumulate: bool = False) -> None:
        self.ops.rms_norm(x, weight, eps, out, accumulate=accumulate)

    def silu_mul(self, gate_up: F32, out: F32) -> None:
        self.ops.silu_mul(gate_up, out)

    def rope_write(
        self, qkv: F32, batch: AttentionBatch, rope: RopeTable, kv: KVLayer, out_q: F32, **norms: Any
    ) -> None:
        self.num_written += len(qkv)
        self.ops.rope_write(qkv, batch, rope, kv, out_q, **norms)
        for start, table in zip(batch.start_position, batch.block_tables[kv.group], strict=True):
            if start <= self.forgets_to_write < start + len(qkv):
                block, slot = divmod(self.forgets_to_write, kv.block_size)
                k, v = layout.read_tokens(kv, table, (block + 1) * kv.block_size)
                fill_slots_with_nan(kv, int(table[block]), slot)
                for later in range(slot + 1, kv.block_size):
                    position = block * kv.block_size + later
                    layout.write_token(kv, int(table[block]), later, k[:, position], v[:, position])

    def attention_input(
        self, x: F32, projection: AttentionProjection, batch: AttentionBatch, rope: RopeTable, kv: KVLayer, out_q: F32
    ) -> None:
        qkv = np.empty((len(x), projection.qkv.num_outputs), np.float32)
        self.norm_linear(x, projection.norm, projection.eps, projection.qkv, qkv)
        norms = {"q_norm": projection.q_norm, "k_norm": projection.k_norm}
        self.rope_write(qkv, batch, rope, kv, out_q, **norms, norm_eps=projection.eps)

    def norm_linear(self, x: F32, norm: F32, eps: float, weight: PackedLinear, out: F32) -> None:
        self.ops.norm_linear(x, norm, eps, weight, out)

    def gated_mlp(
        self, hidden: F32, norm: F32, eps: float, gate_up: PackedLinear, down: PackedLinear, **variant: Any
    ) -> None:
        self.ops.gated_mlp(hidden, norm, eps, gate_up, down, **variant)

    def decoder_layers(
        self, layers: Sequence[DecoderLayer], kv_layers: Sequence[KVLayer], count: int, rows: DecoderRows
    ) -> None:
        if self.breaks or self.forgets_to_write >= 0:
            run_layers(cast(Ops, self), layers, kv_layers, count, rows)
            return
        self.num_written += count * len(rows.hidden)
        self.ops.decoder_layers(layers, kv_layers, count, rows)

    def paged_attention(
        self, q: F32, batch: AttentionBatch, kv: KVLayer, scale: float, out: F32, **variant: Any
    ) -> None:
        if self.breaks:
            raise RuntimeError("told to break")
        self.ops.paged_attention(q, batch, kv, scale, out, **variant)

    def draw(self, logits: F32, rows: I32, settings: F64, must_be_finite: bool, out: I32) -> None:
        self.ops.draw(logits, rows, settings, must_be_finite, out)

    def uniform_numbers(self, seeds: list[int], positions: list[int], second_key: int) -> F64:
        return self.ops.uniform_numbers(seeds, positions, second_key)

    def copy_blocks(self, pool: U8, block_bytes: int, sources: I32, targets: I32) -> None:
        self.num_copied += len(sources)
        if not self.loses_copies:
            self.ops.copy_blocks(pool, block_bytes, sources, targets)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama3")


@pytest.fixture
def ops() -> WrappedOps:
    return WrappedOps(NativeOps(2))


@pytest.fixture
def model(path: Path, ops: WrappedOps) -> CausalLM:
    return load_model(open_model(path), ops, "bf16")


def test_a_lost_copy_is_seen(model: CausalLM, ops: WrappedOps) -> None:
    def make(**settings: Any) -> Engine:
        return Engine(model, ops, **settings)

    expected = cases.cold(make, PROMPT)
    cases.warm_at_offset(make, PROMPT, expected, 37)
    ops.loses_copies = True
    with pytest.raises(AssertionError, match="error"):  # NaN in the slots: the request fails
        cases.warm_at_offset(make, PROMPT, expected, 37)
    cases.warm_at_offset(make, PROMPT, expected, 32)  # no copy, no harm


def test_one_slot_that_is_not_written_is_seen(model: CausalLM, ops: WrappedOps) -> None:
    engine = Engine(model, ops)
    ops.forgets_to_write = 41
    answer = engine.ask("a", PROMPT)
    assert answer.final is not None
    assert answer.final.finish_reason == "error"
    assert answer.final.error is not None
    assert "not finite" in answer.final.error


def test_foreign_values_in_slots_are_seen(model: CausalLM, ops: WrappedOps) -> None:
    """Another sequence's K and V are finite: only the comparison sees them."""

    def make(**settings: Any) -> Engine:
        return Engine(model, ops, **settings)

    expected = cases.cold(make, PROMPT)
    engine = make()
    engine.ask("first", PROMPT)
    first, second = engine.plans[0].rows[0].block_tables[0][:2]
    blocks = engine.storage.pool.reshape(-1, engine.spec.bytes_per_block)
    blocks[first] = blocks[second]
    again = engine.ask("again", PROMPT)
    with pytest.raises(AssertionError, match="logits of token 0 differ"):
        cases.assert_same(again, expected, "damaged")


@pytest.mark.parametrize("num_steps", [1, 3, 8])
def test_a_step_that_broke_off_poisons_nothing(model: CausalLM, ops: WrappedOps, num_steps: int) -> None:
    """F4: in the middle of a layer, in prefill or decode; the next request hits what was committed, bit for bit."""

    def make(**settings: Any) -> Engine:
        return Engine(model, ops, **settings)

    expected = cases.cold(make, PROMPT)
    engine = make(config=cases.SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=30))
    engine.add("one", PROMPT)
    engine.add("two", [*PROMPT[:50], 7, 8, 9])
    for _ in range(num_steps):
        engine.step()
    ops.breaks = True
    with pytest.raises(RuntimeError, match="told to break"):
        engine.step()
    ops.breaks = False
    assert {output.finish_reason for output in engine.core.fail_all("told to break")} == {"error"}
    assert engine.core.status().used_blocks == 0
    engine.answers.clear()
    answer = engine.ask("again", PROMPT)
    assert answer.final is not None
    assert answer.final.num_cached_tokens >= 16 * min(num_steps, 6)
    cases.assert_same(answer, expected, "after a broken step")


@pytest.mark.parametrize("kv_format", ["f32", "bf16", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("block_size", [16, 32])
def test_poison_lands_in_the_slots_that_it_is_for(
    model: CausalLM, ops: WrappedOps, kv_format: str, block_size: int
) -> None:
    engine = Engine(model, ops, kv_format, block_size=block_size, num_blocks=3)
    table = np.array([0, 1, 2], np.int32)
    for first_slot in (0, 1, 15, 16, block_size - 1):
        engine.storage.pool.fill(0)
        fill_slots_with_nan(engine.storage.layers[1], 1, first_slot)
        expected = np.zeros(3 * block_size, bool)
        expected[block_size + first_slot : 2 * block_size] = True
        for layer in engine.storage.layers:
            for part in layout.read_tokens(layer, table, 3 * block_size):
                is_nan = np.isnan(part)
                assert (is_nan == (expected[None, :, None] & (layer is engine.storage.layers[1]))).all()


def test_the_ledger_equals_what_the_kernels_processed(model: CausalLM, ops: WrappedOps) -> None:
    """Law 4, with hits, copies, preemptions, a fork and an abort in it; F17."""
    engine = Engine(model, ops, num_blocks=9, config=cases.SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24))
    long = SamplingParams(max_tokens=40, temperature=0.0)
    for index in range(4):
        engine.add(f"s{index}", cases.other_ids(index, 14, 300), long)
    engine.add("a", PROMPT[:60], long)
    engine.add("b", [*PROMPT[:40], 5, 6, 7], long)
    for _ in range(30):
        engine.step()
    engine.core.abort("s1")
    engine.run()
    engine.ask("again", PROMPT[:60], long)
    status = engine.core.status()
    for count in (status.hit_tokens, status.copies, status.preemptions, status.recomputed_tokens):
        assert count > 0
    assert ops.num_written == model.config.num_layers * status.processed_tokens
    assert status.computed_tokens + status.recomputed_tokens == status.processed_tokens
    assert ops.num_copied == status.copies
    whole = [answer.final for name, answer in engine.answers.items() if name != "s1"]
    asked = sum(final.num_prompt_tokens + final.num_output_tokens - 1 for final in whole if final is not None)
    aborted = engine.rows_of("s1")
    num_of_aborted = len({position for _, start, count in aborted for position in range(start, start + count)})
    assert status.hit_tokens + status.computed_tokens == asked + num_of_aborted
