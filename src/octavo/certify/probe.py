"""The engine as it serves, with an ear at the model: scheduler, blocks and executor are the real ones.

Whatever runs in a step, the logits of all rows that somebody wants are handed on with the request and the positions
that they are of. It does not know what they are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.block_manager import BlockManager
from octavo.core.config import SchedulerConfig
from octavo.core.engine_core import EngineCore
from octavo.core.kv_spec import KVSpec
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import Row, StepPlan, StepResult
from octavo.executor.kv_scales import KVScales, scales_in_use
from octavo.executor.kv_storage import KVStorage
from octavo.executor.model_executor import ModelExecutor
from octavo.kernels.ops import F32, I32, AttentionBatch, KVLayer, Ops
from octavo.models.config import ModelConfig
from octavo.models.family import CausalLM

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Heard:
    """Logits of consecutive positions of one request."""

    request_id: str
    first: int
    logits: F32  # [positions, vocab_size]; the listener's to change


def pool_bytes(spec: KVSpec, config: SchedulerConfig) -> int:
    """What a probe's cache takes."""
    return spec.pool_bytes(_num_blocks(spec, config))


def _num_blocks(spec: KVSpec, config: SchedulerConfig) -> int:
    each = spec.blocks_for_tokens(config.max_model_len, config.max_num_batched_tokens) + len(spec.groups)
    return each * config.max_num_seqs


class _Tap:
    """A model that also gives the logits that nobody would have asked for. Owned by its probe."""

    def __init__(self, model: CausalLM) -> None:
        self.config: ModelConfig = model.config
        self.rows: Sequence[Row] = ()
        self.first_wanted: dict[str, int] = {}
        self.heard: list[Heard] = []
        self._model = model

    def forward(self, token_ids: I32, batch: AttentionBatch, kv_layers: Sequence[KVLayer], logits_rows: I32) -> F32:
        begins: list[tuple[str, int, int, int]] = []
        wanted: list[int] = []
        for row, begin in zip(self.rows, batch.query_start.tolist(), strict=False):
            skipped = max(0, self.first_wanted.get(row.request_id, 1 << 60) - row.start)
            count = max(0, len(row.token_ids) - skipped)
            begins.append((row.request_id, row.start + skipped, len(wanted), count))
            wanted += range(begin + skipped, begin + skipped + count)
        places = {index: place for place, index in enumerate(wanted)}
        for index in logits_rows.tolist():
            if index not in places:
                places[index] = len(wanted)
                wanted.append(index)
        logits = self._model.forward(token_ids, batch, kv_layers, np.array(wanted, np.int32))
        asked = logits[[places[index] for index in logits_rows.tolist()]]
        self.heard = [Heard(name, first, logits[at : at + count]) for name, first, at, count in begins if count]
        return asked


class Probe:
    """One engine over one pool; texts go in by `add`, and each `step` gives what was heard."""

    def __init__(
        self, model: CausalLM, ops: Ops, spec: KVSpec, config: SchedulerConfig, scales: KVScales | None = None
    ) -> None:
        """The pool holds `max_num_seqs` texts of `max_model_len`: nobody is preempted."""
        num_blocks = _num_blocks(spec, config)
        self._tap = _Tap(model)
        scheduler = Scheduler(config, BlockManager(spec, num_blocks), vocab_size=model.config.vocab_size)
        storage = KVStorage(spec, num_blocks, scales=scales_in_use(scales, model, spec))
        self._inner = ModelExecutor(self._tap, ops, storage)
        self.core = EngineCore(scheduler, self)
        self.cached_tokens: dict[str, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        self._tap.rows = plan.rows
        return self._inner.execute(plan)

    def add(self, name: str, token_ids: Sequence[int], first_wanted: int | None, new_tokens: int = 1) -> None:
        """first_wanted: the first position whose logits are to be heard; None: of nobody. It draws greedily."""
        if first_wanted is not None:
            self._tap.first_wanted[name] = first_wanted
        params = _ONE_TOKEN if new_tokens == 1 else SamplingParams(new_tokens, temperature=0.0, ignore_eos=True)
        self.core.add(Request(name, token_ids, params, seed=0))

    def step(self) -> list[Heard]:
        """What a step's rows gave. Raises AssertionError if a request failed: its text is one that was read before."""
        self._tap.heard = []
        for output in self.core.step():
            assert output.error is None, output.error
            if output.finish_reason is not None:
                self.cached_tokens[output.request_id] = output.num_cached_tokens
        heard, self._tap.heard = self._tap.heard, []
        return heard

    @property
    def has_work(self) -> bool:
        return self.core.has_work
