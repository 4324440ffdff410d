"""Runs a plan on a model: copies, forward, one token for each branch that samples.

A fault of one row (a token id that the model does not have, logits that are not finite) ends that request and no other.
It keeps no memory of requests between steps, and does not know why the plan is as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from octavo.core.step import BlockCopy, Row, SampledToken, SampleSpec, StepPlan, StepResult
from octavo.executor.batch import build_batch, build_copies, is_sampled, num_scored
from octavo.executor.kv_storage import KVStorage
from octavo.executor.sampler import OpsSampler, SampleFailure
from octavo.executor.scores import candidates, score_prompt
from octavo.executor.selection import Selector
from octavo.kernels.ops import F32, I32, AttentionBatch, KVLayer, Ops

Sampler = Callable[[F32, Sequence[SampleSpec]], list[SampledToken | SampleFailure]]


class Vocabulary(Protocol):
    @property
    def vocab_size(self) -> int: ...


class ForwardModel(Protocol):
    """What the executor needs of a model (`models.loader.CausalLM` is one)."""

    @property
    def config(self) -> Vocabulary: ...

    def forward(
        self, token_ids: I32, batch: AttentionBatch, kv_layers: Sequence[KVLayer], logits_rows: I32
    ) -> F32: ...  # [len(logits_rows), vocab_size]


class ModelExecutor:
    """`core.step.Executor` on a real model."""

    def __init__(self, model: ForwardModel, ops: Ops, kv_storage: KVStorage, sampler: Sampler | None = None) -> None:
        """sampler: None is the operations' own."""
        self._model = model
        self._ops = ops
        self._kv_storage = kv_storage
        self._sampler = OpsSampler(ops) if sampler is None else sampler
        self._selector = Selector(kv_storage.layers)

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.copies or plan.compactions:
            self._move(plan)
        rows, failed = self._runnable(plan.rows)
        if not rows:
            return StepResult({}, failed, 0)
        last = (table[-1] for row in rows for table in row.block_tables if len(table))
        self._kv_storage.mark_used(max(last, default=0))
        weighed = self._selector.weighed_rows(rows)
        batch = build_batch(rows, self._kv_storage.spec.block_size, weighed)
        logits = self._model.forward(batch.token_ids, batch.attention, self._kv_storage.layers, batch.logits_rows)
        result = StepResult({}, failed, len(batch.token_ids))
        self._sample(rows, logits, result)
        for one in weighed:
            row = rows[one.sequence]
            result.weighed[row.request_id] = self._selector.weighed(row, one)
        return result

    def _sample(self, rows: Sequence[Row], logits: F32, result: StepResult) -> None:
        """logits: as `build_batch` asked for them."""
        drawing: list[tuple[str, SampleSpec]] = []
        indices: list[int] = []  # the row of logits that each draws from
        index = 0
        for row in rows:
            if row.prompt_scores is not None:
                count = num_scored(row)
                scores = score_prompt(logits[index : index + count], row.prompt_scores)
                index += count
                if isinstance(scores, SampleFailure):
                    result.failed[row.request_id] = scores.reason
                else:
                    result.prompt_scores[row.request_id] = scores
            if is_sampled(row):
                specs = [] if row.sample is None else [(row.request_id, row.sample)]
                specs += [(branch.request_id, branch.sample) for branch in row.branch_samples]
                drawing += [one for one in specs if not one[1].num_candidates]
                indices += [index for one in specs if not one[1].num_candidates]
                for name, spec in specs:
                    if spec.num_candidates:
                        self._find_candidates(name, logits[index], spec, result)
                index += 1
        if drawing:
            chosen = logits if indices == list(range(len(logits))) else logits[indices]
            for (name, _), token in zip(drawing, self._sampler(chosen, [spec for _, spec in drawing]), strict=True):
                if isinstance(token, SampledToken):
                    result.sampled[name] = token
                else:
                    result.failed[name] = token.reason

    @staticmethod
    def _find_candidates(name: str, logits: F32, spec: SampleSpec, result: StepResult) -> None:
        found = candidates(logits, spec)
        if isinstance(found, SampleFailure):
            result.failed[name] = found.reason
        else:
            result.candidates[name] = found

    def _move(self, plan: StepPlan) -> None:
        """Copies and compactions, in the order of the plan."""
        done = 0
        for compaction in plan.compactions:
            self._copy(plan.copies[done : compaction.num_copies_before])
            self._selector.compact(compaction)
            done = compaction.num_copies_before
        self._copy(plan.copies[done:])

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        """Whole blocks: what a copy brings beyond its tokens lies in slots that are written before they are read."""
        if copies:
            sources, targets = build_copies(copies)
            self._ops.copy_blocks(self._kv_storage.pool, self._kv_storage.spec.bytes_per_block, sources, targets)

    def _runnable(self, rows: Sequence[Row]) -> tuple[Sequence[Row], dict[str, str]]:
        """The rows whose tokens the model has, and why the others fail."""
        limit = self._model.config.vocab_size
        if all(max(row.token_ids) < limit and min(row.token_ids) >= 0 for row in rows):
            return rows, {}
        failed = {}
        for row in rows:
            strange = next((token_id for token_id in row.token_ids if not 0 <= token_id < limit), None)
            if strange is not None:
                failed[row.request_id] = (
                    f"token id {strange} is not in the model's vocabulary; ids go from 0 to {limit - 1}"
                )
        return [row for row in rows if row.request_id not in failed], failed
