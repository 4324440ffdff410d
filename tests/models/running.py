"""Runs a model over a small pool of its own, as an executor would: for tests that compare logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.kv_spec import KVSpec
from octavo.executor.kv_storage import KVStorage
from octavo.kernels.ops import F32, I32, AttentionBatch, KVLayer
from octavo.models.loader import CausalLM

BLOCK_SIZE = 16


def new_pool(model: CausalLM, num_blocks: int, kv_format: str = "f32") -> list[KVLayer]:
    """The layers of a pool of so many blocks for each KV group, whose every slot holds NaN."""
    spec = KVSpec(model.kv_groups(kv_format), BLOCK_SIZE)
    return list(KVStorage(spec, num_blocks * len(spec.groups), fill_with_nan=True).layers)


def batch_of(rows: Sequence[tuple[int, int, Sequence[int]]], num_groups: int = 1) -> AttentionBatch:
    """rows: (start position, number of tokens, block table) of each sequence; the groups' blocks lie side by side."""
    widest = max(len(table) for _, _, table in rows)
    tables = np.array([[*table, *[0] * (widest - len(table))] for _, _, table in rows], np.int32)
    return AttentionBatch(
        query_start=np.cumsum([0, *(count for _, count, _ in rows)], dtype=np.int32),
        start_position=np.array([start for start, _, _ in rows], np.int32),
        block_tables=np.stack([tables * num_groups + group for group in range(num_groups)]),
    )


def greedy(model: CausalLM, token_ids: Sequence[int], num_new: int, kv_format: str = "f32") -> list[int]:
    """The next tokens of a sequence, each the most likely one."""
    num_blocks = -(-(len(token_ids) + num_new) // BLOCK_SIZE)
    layers, table = new_pool(model, num_blocks, kv_format), list(range(num_blocks))
    num_groups, found = len(model.kv_groups(kv_format)), list[int]()
    ids, start = list(token_ids), 0
    while len(found) < num_new:
        last = np.array([len(ids) - 1], np.int32)
        logits = model.forward(np.array(ids, np.int32), batch_of([(start, len(ids), table)], num_groups), layers, last)
        start, ids = start + len(ids), [int(logits[0].argmax())]
        found += ids
    return found


def logits_of(
    model: CausalLM, token_ids: Sequence[int], chunks: Sequence[int] = (), kv_format: str = "f32", every: bool = True
) -> F32:
    """Logits of one sequence, computed in chunks of these sizes (the rest in one); of its last row unless `every`."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    table = list(range(num_blocks, 0, -1))  # block 0 is never used, and the order is not the natural one
    layers = new_pool(model, num_blocks + 1, kv_format)
    sizes = [*chunks, len(token_ids) - sum(chunks)]
    found, start, num_groups = [], 0, len(model.kv_groups(kv_format))
    for size in sizes:
        ids = np.array(token_ids[start : start + size], np.int32)
        is_last = start + size == len(token_ids)
        rows: I32 = np.arange(size, dtype=np.int32) if every else np.arange(size - is_last, size, dtype=np.int32)
        found.append(model.forward(ids, batch_of([(start, size, table)], num_groups), layers, rows))
        start += size
    return np.concatenate(found)
