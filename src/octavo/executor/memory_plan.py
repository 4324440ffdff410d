"""The plan of a whole process: what it was before, weights, cache, and what work needs; beside what was allocated.

It reads no process: `memory` does. Blocks and weights are exact; what work and loading need are bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.core.config import SchedulerConfig
from octavo.core.keep_policy import parse_policy
from octavo.core.kv_spec import KVSpec
from octavo.core.selection import SelectionPlan
from octavo.executor.kv_storage import KVStorage
from octavo.models.loader import ModelSource

OVERHEAD_BYTES = 48 << 20  # tokenizer, the libraries' arenas, Python objects of requests
_F32 = 4
_ACTIVATION_COPIES = 2  # inputs and outputs of a layer's matrices at once
_LOGIT_COPIES = 4  # logits, and what sampling makes of them
_COUNT_BYTES, _COUNT_COPIES = 8, 3  # attention that a slot got: held, summed up, and handed back
_SCORE_BYTES, _SPAN_KEYS, _PIECE_TOKENS, _BLOCK_ROWS = 1 << 20, 256, 16, 12  # of the kernel that counts attention
_MAX_HEAD_DIM, _THREAD_BYTES = 256, 64 << 10
_LOADING_TENSORS = 10  # in float32 at once: five matrices of two tensors, on four threads and one being packed


class HoldsWeights(Protocol):
    """A loaded model, as far as its memory goes."""

    @property
    def weights_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of a process, decided before its weights are read."""

    base_bytes: int  # resident before the model was opened
    file_bytes: int  # of the mapped weight files; the system may drop them at any time
    weights_bytes: int
    kv_bytes: int
    working_bytes: int  # at most: activations, logits, scales of the cache, tokenizer, libraries
    loading_bytes: int  # at most: matrices in float32 between the file and the kernels' form

    @property
    def peak_bytes(self) -> int:
        """The most that can be resident. Loading is over before the cache is written to."""
        later = max(self.loading_bytes, self.kv_bytes + self.working_bytes)
        return self.base_bytes + self.file_bytes + self.weights_bytes + later


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """A plan beside what was allocated, read from the buffers themselves."""

    plan: MemoryPlan
    kv_allocated_bytes: int
    weights_held_bytes: int

    def words(self, peak_bytes: int) -> str:
        """One line at the end of a run."""
        plan = self.plan
        under = "under" if peak_bytes <= plan.peak_bytes else "ABOVE"
        return f"at most {peak_bytes} bytes were resident, {under} the {plan.peak_bytes} that were planned"

    def as_object(self) -> dict[str, int]:
        """The plan and the allocation, as `/v1/kv/status` shows them."""
        plan = self.plan
        return {
            "base_bytes": plan.base_bytes,
            "file_bytes": plan.file_bytes,
            "weights_bytes": plan.weights_bytes,
            "kv_bytes": plan.kv_bytes,
            "working_bytes": plan.working_bytes,
            "loading_bytes": plan.loading_bytes,
            "peak_bytes": plan.peak_bytes,
            "kv_allocated_bytes": self.kv_allocated_bytes,
            "weights_held_bytes": self.weights_held_bytes,
        }

    def differences(self) -> tuple[str, ...]:
        """What is not as it was planned: nothing, or sentences with both numbers."""
        found = []
        if self.kv_allocated_bytes != self.plan.kv_bytes:
            found.append(f"the KV cache has {self.kv_allocated_bytes} bytes and {self.plan.kv_bytes} were planned")
        return tuple(found)


def account(
    source: ModelSource,
    weights_dtype: str,
    scheduler: SchedulerConfig,
    base_bytes: int,
    num_threads: int,
    allocated: tuple[KVStorage, HoldsWeights],
) -> MemoryAccount:
    """The plan by the model's headers and the cache's spec, beside the buffers of what was loaded."""
    headers = source.weights.file.tensors.values()
    shapes = [header.shape for header in headers]
    storage, model = allocated
    plan = MemoryPlan(
        base_bytes=base_bytes,
        file_bytes=sum(header.num_bytes for header in headers),
        weights_bytes=source.weights_bytes(weights_dtype),
        kv_bytes=storage.spec.pool_bytes(storage.num_blocks),
        working_bytes=working_bytes(
            shapes, source.config.num_layers, activation_rows(scheduler), scheduler.max_num_seqs
        )
        + counting_bytes(storage.spec, scheduler, source.config.num_heads, num_threads)
        + storage.scales_bytes,
        loading_bytes=loading_bytes(shapes),
    )
    return MemoryAccount(plan, storage.allocated_bytes, model.weights_bytes)


def activation_rows(scheduler: SchedulerConfig) -> int:
    """How many times a step holds a row of all outputs of a layer, at most.

    Families that have larger steps for a prompt alone (`Family.in_blocks`) hold most of the outputs, those of an MLP,
    for blocks of rows only.
    """
    return max(_ACTIVATION_COPIES * scheduler.max_num_batched_tokens, scheduler.most_step_tokens)


def working_bytes(shapes: Sequence[tuple[int, ...]], num_layers: int, num_rows: int, num_sequences: int) -> int:
    """What steps need at most that hold so many rows of activations, by the shapes of the model's tensors
    [outputs, inputs].
    """
    matrices = [shape for shape in shapes if len(shape) == 2]
    vocab = max((shape[0] for shape in matrices), default=0)
    outputs = sum(shape[0] for shape in matrices if shape[0] < vocab)
    activations = num_rows * -(-outputs // max(1, num_layers)) * _F32
    return activations + num_sequences * vocab * _F32 * _LOGIT_COPIES + OVERHEAD_BYTES


def counting_bytes(spec: KVSpec, scheduler: SchedulerConfig, num_heads: int, num_threads: int) -> int:
    """What counting attention takes under the policy of all requests: counts between and in steps, and the kernel's
    scratch. One that a request asks for comes on top.

    Where a text chooses once, at the end of its prompt, two are at that place: prompts are computed in order.
    """
    keep, longest = parse_policy(scheduler.kv_policy), scheduler.max_model_len
    drops = None if keep is None else keep.plan(spec.block_size, longest)
    if keep is None or not isinstance(drops, SelectionPlan):
        return 0
    slots = min(longest, keep.most_slots(spec.block_size) or longest)
    counts = slots * sum(len(group.layer_indices) * group.num_kv_heads for group in spec.groups)
    num_sequences = 2 if drops.piece is None else scheduler.max_num_seqs
    scratch = max(
        counting_scratch_bytes(slots, num_heads // group.num_kv_heads, group.head_dim, num_threads)
        for group in spec.groups
    )
    return _COUNT_BYTES * _COUNT_COPIES * counts * (num_sequences + 1) + scratch


def counting_scratch_bytes(num_slots: int, heads_of_kv_head: int, head_dim: int, num_threads: int) -> int:
    """What `Ops.attention_mass` holds beside its operands, at most: for each thread the scores of a piece of rows over
    all slots, with rows that no token has, and the counts of one KV head; and what attention itself needs of a thread.
    """
    slots = -(-num_slots // _SPAN_KEYS) * _SPAN_KEYS
    token = _F32 * heads_of_kv_head * slots
    scores = 3 * min(_PIECE_TOKENS * token, max(_SCORE_BYTES, token)) // 2 + 2 * _F32 * _BLOCK_ROWS * slots
    tiles = 2 * _F32 * head_dim * (_SPAN_KEYS + _PIECE_TOKENS)
    queries = 2 * _F32 * _MAX_HEAD_DIM * _PIECE_TOKENS * heads_of_kv_head
    return num_threads * (scores + _COUNT_BYTES * slots + tiles + queries + _THREAD_BYTES)


def loading_bytes(shapes: Sequence[tuple[int, ...]]) -> int:
    """What reading the weights needs at most beside them."""
    largest = sorted((math.prod(shape) for shape in shapes), reverse=True)[:_LOADING_TENSORS]
    return _F32 * sum(largest)
