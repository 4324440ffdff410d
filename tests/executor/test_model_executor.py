"""The contract, with a model that writes and reads real slots and whose answers can be known by hand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import BlockCopy, Row, SampleSpec, StepPlan, StepResult
from octavo.executor.kv_storage import KVStorage
from octavo.executor.model_executor import ModelExecutor
from octavo.kernels.ops import F32, I32, AttentionBatch, KVLayer
from octavo.kernels.reference import ReferenceOps
from octavo.kv_formats import layout

VOCAB_SIZE = 50
SPEC = KVSpec((KVGroupSpec("full", (0,), 1, 16, "f32"),), 16)
GREEDY = SampleSpec(SamplingParams(temperature=0.0), 0, 0)


@dataclass(frozen=True)
class Config:
    vocab_size: int = VOCAB_SIZE


class SummingModel:
    """Writes each token's id as K; the logit of (sum of all ids up to the row) % VOCAB_SIZE is highest.

    Token 13 makes logits that are NaN.
    """

    config = Config()

    def __init__(self) -> None:
        self.num_rows = 0

    def forward(self, token_ids: I32, batch: AttentionBatch, kv_layers: Sequence[KVLayer], logits_rows: I32) -> F32:
        (kv,) = kv_layers
        sums = np.zeros(len(token_ids), np.int64)
        for sequence in range(len(batch.start_position)):
            first, last = batch.query_start[sequence : sequence + 2]
            table = batch.block_tables[kv.group, sequence]
            for row in range(first, last):
                self.num_rows += 1
                position = int(batch.start_position[sequence]) + row - int(first)
                values = np.full((1, 16), token_ids[row], np.float32)
                layout.write_token(kv, int(table[position // 16]), position % 16, values, values)
                k, _ = layout.read_tokens(kv, table, position + 1)
                sums[row] = int(k[0, :, 0].sum())
        logits = np.zeros((len(logits_rows), VOCAB_SIZE), np.float32)
        for index, row in enumerate(logits_rows):
            logits[index, sums[row] % VOCAB_SIZE] = np.nan if token_ids[row] == 13 else 1.0
        return logits


def make(num_blocks: int = 8) -> tuple[ModelExecutor, SummingModel, KVStorage]:
    model, storage = SummingModel(), KVStorage(SPEC, num_blocks, fill_with_nan=True)
    return ModelExecutor(model, ReferenceOps(), storage), model, storage


def row(request_id: str, start: int, token_ids: tuple[int, ...], table: list[int], sampled: bool = True) -> Row:
    return Row(request_id, start, token_ids, (array("i", table),), GREEDY if sampled else None)


def tokens(result: StepResult) -> dict[str, int]:
    return {request_id: token.token_id for request_id, token in result.sampled.items()}


def test_chunks_and_decode_read_what_was_written_before() -> None:
    executor, model, _ = make()
    first = executor.execute(StepPlan(0, (), (row("a", 0, tuple(range(20)), [5, 2], sampled=False),)))
    assert first == StepResult({}, {}, 20)
    second = executor.execute(StepPlan(1, (), (row("a", 20, (7, 1), [5, 2]), row("b", 0, (4, 5), [0]))))
    assert tokens(second) == {"a": (190 + 8) % 50, "b": 9}
    assert second.num_tokens == 4
    assert model.num_rows == 24


def test_copies_come_first_and_in_order() -> None:
    executor, _, _ = make()
    executor.execute(StepPlan(0, (), (row("a", 0, (1, 2, 3), [0]), row("b", 0, (10, 20), [1]))))
    copies = (BlockCopy(0, 2, 3), BlockCopy(1, 0, 2))  # the second overwrites the source of the first
    result = executor.execute(StepPlan(1, copies, (row("a2", 3, (4,), [2]), row("b2", 2, (5,), [0]))))
    assert tokens(result) == {"a2": 10, "b2": 35}


def test_a_foreign_token_id_fails_its_request_alone() -> None:
    executor, model, _ = make()
    plan_rows = (
        row("a", 0, (1, 2), [0]),
        row("b", 0, (3, VOCAB_SIZE), [1]),
        row("c", 0, (-1,), [2]),
        row("d", 0, (2**40,), [3]),
        row("e", 0, (5,), [4]),
    )
    result = executor.execute(StepPlan(0, (), plan_rows))
    assert tokens(result) == {"a": 3, "e": 5}
    assert set(result.failed) == {"b", "c", "d"}
    assert "50" in result.failed["b"]
    assert "0 to 49" in result.failed["b"]
    assert result.num_tokens == model.num_rows == 3


@pytest.mark.parametrize("strange", [VOCAB_SIZE, -1])
def test_when_every_row_fails_nothing_runs(strange: int) -> None:
    executor, model, _ = make()
    result = executor.execute(StepPlan(0, (), (row("a", 0, (strange,), [0]),)))
    assert result.sampled == {}
    assert set(result.failed) == {"a"}
    assert result.num_tokens == model.num_rows == 0


def test_logits_that_are_not_finite_fail_their_request_alone() -> None:
    executor, _, _ = make()
    result = executor.execute(
        StepPlan(0, (), (row("a", 0, (1,), [0]), row("b", 0, (13,), [1]), row("c", 0, (2,), [2])))
    )
    assert tokens(result) == {"a": 1, "c": 2}
    assert "not finite" in result.failed["b"]
    assert result.num_tokens == 3


def test_a_plan_without_rows_only_copies() -> None:
    executor, _, storage = make()
    executor.execute(StepPlan(0, (), (row("a", 0, (1, 2), [0]),)))
    assert executor.execute(StepPlan(1, (BlockCopy(0, 1, 2),), ())) == StepResult({}, {}, 0)
    block_bytes = SPEC.bytes_per_block
    assert (storage.pool[:block_bytes] == storage.pool[block_bytes : 2 * block_bytes]).all()


def test_nothing_of_a_request_is_kept_between_steps() -> None:
    executor, _, _ = make()
    before = {name: id(value) for name, value in vars(executor).items()}
    executor.execute(StepPlan(0, (), (row("a", 0, (1, 2), [0]),)))
    assert {name: id(value) for name, value in vars(executor).items()} == before


def test_the_pool_hears_which_blocks_rows_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = KVStorage(SPEC, 8)
    marked: list[int] = []
    monkeypatch.setattr(storage, "mark_used", marked.append)
    executor = ModelExecutor(SummingModel(), ReferenceOps(), storage)
    executor.execute(StepPlan(0, (), (row("a", 0, (1,) * 17, [4, 2]), row("b", 0, (3,), [0]))))
    assert marked == [2]
