"""An engine that remembers the logits of every token it draws, for tests that compare them bit by bit.

Core, executor, sampler, model and operations are the real ones. Around the model, a recorder keeps the logits of each
sampled row and, before each step, fills with NaN every slot that the step's rows are about to write or do not use yet,
and every block that is about to be copied to: a read of a slot that was never written gives NaN, and fails the request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from octavo.core.block_manager import BlockManager
from octavo.core.config import SchedulerConfig
from octavo.core.engine_core import EngineCore
from octavo.core.keep_policy import KeepPolicy
from octavo.core.kv_groups import with_formats
from octavo.core.kv_spec import KVSpec
from octavo.core.request import Request
from octavo.core.request_output import RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import StepPlan, StepResult
from octavo.executor.batch import is_sampled, num_scored
from octavo.executor.kv_scales import KVScales, scales_in_use
from octavo.executor.kv_storage import KVStorage
from octavo.executor.model_executor import ModelExecutor
from octavo.kernels.ops import F32, I32, AttentionBatch, KVLayer, Ops
from octavo.kv_formats import layout
from octavo.models.loader import CausalLM

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
Ids = Sequence[int]


def fill_slots_with_nan(kv: KVLayer, block_id: int, first_slot: int) -> None:
    """NaN in K and V, or the latent, of slots [first_slot, block_size) of one layer: all bits set, or by the codec."""
    if kv.kv_format not in ("f32", "bf16") or kv.kind == "tail":
        fill_by_codec(kv, block_id, first_slot)
        return
    item = np.uint16 if kv.kv_format == "bf16" else np.uint32
    if kv.kind == "latent":
        fill_latents_with_nan(kv, block_id, first_slot, item)
        return
    tiles, size, dim = kv.block_size // 16, kv.block_size, kv.head_dim
    start = block_id * kv.block_bytes + kv.layer_offset
    num_bytes = 2 * kv.num_kv_heads * size * dim * np.dtype(item).itemsize
    heads = kv.pool[start : start + num_bytes].view(item).reshape(kv.num_kv_heads, tiles, 2, 16 * dim)
    ones = item(np.iinfo(item).max)
    for tile in range(first_slot // 16, tiles):
        k, v = heads[:, tile, 0], heads[:, tile, 1]
        slots = np.arange(max(0, first_slot - 16 * tile), 16)
        if kv.kv_format == "bf16":
            k.reshape(-1, dim // 2, 16, 2)[:, :, slots] = ones
            v.reshape(-1, 8, dim, 2)[:, slots // 2, :, slots % 2] = ones
        else:
            k.reshape(-1, dim, 16)[:, :, slots] = ones
            v.reshape(-1, 16, dim)[:, slots] = ones


def fill_by_codec(kv: KVLayer, block_id: int, first_slot: int) -> None:
    form, (k_bytes, v_bytes) = layout.codec(kv.kv_format), layout.tile_bytes(kv)
    tiles, start = kv.block_size // 16, block_id * kv.block_bytes + kv.layer_offset
    num_bytes = kv.num_kv_heads * tiles * (k_bytes + v_bytes)
    heads = kv.pool[start : start + num_bytes].reshape(kv.num_kv_heads, tiles, k_bytes + v_bytes)
    for tile in range(first_slot // 16, tiles):
        slot = max(0, first_slot - 16 * tile)
        nothing = np.full((16 - slot, kv.head_dim), np.nan, np.float32)
        for head in range(kv.num_kv_heads):
            if kv.tail is None:
                form.write_k(heads[head, tile, :k_bytes], slot, nothing)
            else:  # K of a tile that is not full: nobody reads it
                form.write_k(heads[head, tile, :k_bytes], 0, np.full((16, kv.head_dim), np.nan, np.float32))
            if v_bytes:
                form.write_v(heads[head, tile, k_bytes:], slot, nothing)


def fill_latents_with_nan(kv: KVLayer, block_id: int, first_slot: int, item: type[np.unsignedinteger]) -> None:
    """Tiles are those of K alone: in f32 [head_dim][16], in bf16 [head_dim / 2][16][2]."""
    start = block_id * kv.block_bytes + kv.layer_offset
    num_bytes = kv.block_size * kv.head_dim * np.dtype(item).itemsize
    width = 2 if kv.kv_format == "bf16" else 1
    tiles = kv.pool[start : start + num_bytes].view(item).reshape(kv.block_size // 16, kv.head_dim // width, 16, width)
    for slot in range(first_slot, kv.block_size):
        tiles[slot // 16, :, slot % 16] = np.iinfo(item).max


class Recorder:
    """A model that keeps the logits of its last call, and poisons what the call is about to write."""

    def __init__(self, model: CausalLM) -> None:
        self.config = model.config
        self.logits: F32 | None = None
        self._model = model

    def forward(self, token_ids: I32, batch: AttentionBatch, kv_layers: Sequence[KVLayer], logits_rows: I32) -> F32:
        size = kv_layers[0].block_size
        lengths = np.diff(batch.query_start)
        for sequence, (start, length) in enumerate(zip(batch.slots, lengths, strict=True)):
            for index in range(int(start) // size, (int(start) + int(length) - 1) // size + 1):
                for kv in (*kv_layers, *(kv.tail for kv in kv_layers if kv.tail is not None)):
                    block_id = int(batch.block_tables[kv.group, sequence, index])
                    fill_slots_with_nan(kv, block_id, max(0, int(start) - index * size))
        self.logits = self._model.forward(token_ids, batch, kv_layers, logits_rows)
        return self.logits


@dataclass
class Answer:
    """What one request got: its tokens, and the logits that each was drawn from."""

    token_ids: list[int] = field(default_factory=list)
    logits: list[F32] = field(default_factory=list)  # [vocab_size] each
    final: RequestOutput | None = None
    num_finals: int = 0


class Engine:
    """One core over one pool. `plans` are all steps so far."""

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        kv_format: str = "bf16",
        *,
        block_size: int = 16,
        num_blocks: int = 64,
        config: SchedulerConfig | None = None,
        formats: Mapping[int, str] | None = None,  # of layers that have another one
        scales: KVScales | None = None,
    ) -> None:
        self.spec = KVSpec(with_formats(model.kv_groups(kv_format), formats or {}), block_size)
        scales = scales_in_use(scales, model, self.spec)
        self.storage = KVStorage(self.spec, num_blocks, scales=scales, fill_with_nan=True)
        self.config = config or SchedulerConfig(max_num_seqs=32)
        self.blocks = BlockManager(self.spec, num_blocks)
        self.scheduler = Scheduler(self.config, self.blocks, vocab_size=model.config.vocab_size)
        self.recorder = Recorder(model)
        self.inner = ModelExecutor(self.recorder, ops, self.storage)
        self.core = EngineCore(self.scheduler, self)
        self.plans: list[StepPlan] = []
        self.answers: dict[str, Answer] = defaultdict(Answer)

    def execute(self, plan: StepPlan) -> StepResult:
        for copy in plan.copies:
            if all(copy.target != other.source for other in plan.copies):
                self.storage.fill_block_with_nan(copy.target)
        result = self.inner.execute(plan)
        self.plans.append(plan)
        logits = self.recorder.logits
        assert logits is not None
        index = 0
        for row in plan.rows:
            index += num_scored(row)
            if is_sampled(row):
                names = [row.request_id] if row.sample is not None else []
                for name in (*names, *(branch.request_id for branch in row.branch_samples)):
                    self.answers[name].logits.append(logits[index].copy())
                index += 1
        assert index == len(logits)
        return result

    def add(
        self,
        name: str,
        prompt: Ids,
        params: SamplingParams = GREEDY,
        *,
        seed: int = 0,
        priority: int = 0,
        keep: KeepPolicy | None = None,
    ) -> None:
        self.core.add(Request(name, prompt, params, seed=seed, priority=priority, keep=keep))

    def step(self) -> None:
        for output in self.core.step():
            answer = self.answers[f"{output.request_id}#{output.branch}" if output.branch else output.request_id]
            if output.token_ids:
                answer.token_ids = list(output.token_ids)
            if output.token is not None:
                answer.token_ids.append(output.token.token_id)
            if output.finish_reason is not None:
                answer.final = output
                answer.num_finals += 1
        status = self.core.status()
        assert status.free_blocks + status.cached_blocks + status.used_blocks == status.num_blocks

    def run(self) -> None:
        """Until every request has ended, and then: nothing leaks, and the ledger balances (law 4)."""
        while self.core.has_work:
            self.step()
        status = self.core.status()
        assert status.used_blocks == 0
        planned = sum(plan.num_tokens for plan in self.plans)
        assert status.processed_tokens == planned
        assert status.computed_tokens + status.recomputed_tokens + status.failed_tokens == planned
        assert all(answer.num_finals == 1 for answer in self.answers.values() if answer.final is not None)
        assert all(answer.final is not None for name, answer in self.answers.items() if "#" not in name)

    def ask(
        self,
        name: str,
        prompt: Ids,
        params: SamplingParams = GREEDY,
        *,
        seed: int = 0,
        keep: KeepPolicy | None = None,
    ) -> Answer:
        """Run one request, and whatever else is there, to the end."""
        self.add(name, prompt, params, seed=seed, keep=keep)
        self.run()
        return self.answers[name]

    def rows_of(self, name: str) -> list[tuple[int, int, int]]:
        """(step, start, number of tokens) of every row of a request."""
        return [
            (index, row.start, len(row.token_ids))
            for index, plan in enumerate(self.plans)
            for row in plan.rows
            if row.request_id == name
        ]

    def preempted(self, name: str) -> bool:
        return any(name in plan.preempted for plan in self.plans)

    @property
    def num_copies(self) -> int:
        return sum(len(plan.copies) for plan in self.plans)


def assert_same(answer: Answer, expected: Answer, what: str) -> None:
    """Bitwise on every row of logits, and so on the tokens."""
    assert answer.final is not None, what
    assert answer.final.finish_reason in ("stop", "length"), f"{what}: {answer.final}"
    assert len(answer.logits) == len(expected.logits), f"{what}: {len(answer.logits)} rows"
    assert_same_start(answer, expected, what)
    assert answer.token_ids == expected.token_ids, what


def assert_same_start(answer: Answer, expected: Answer, what: str) -> None:
    """As far as the answer goes."""
    for index, (mine, theirs) in enumerate(zip(answer.logits, expected.logits, strict=False)):
        if not np.array_equal(mine.view(np.uint32), theirs.view(np.uint32)):
            differing = int(np.count_nonzero(mine.view(np.uint32) != theirs.view(np.uint32)))
            worst = float(np.abs(mine - theirs).max())
            raise AssertionError(f"{what}: logits of token {index} differ in {differing} places, by up to {worst}")


def chunked(num_tokens: int, *, max_num_seqs: int = 1) -> SchedulerConfig:
    """A scheduler that computes at most so many tokens in a step."""
    return SchedulerConfig(max_num_seqs=min(max_num_seqs, num_tokens), max_num_batched_tokens=num_tokens)


def with_tokens(params: SamplingParams, max_tokens: int) -> SamplingParams:
    return replace(params, max_tokens=max_tokens)
