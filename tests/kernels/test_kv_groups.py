"""A layer reads and writes by the block table of its own KV group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.kernels.ops import AttentionBatch, Ops, RopeTable
from octavo.kernels.reference import ReferenceOps
from tests.kernels.paged_case import Geometry, Piece, Pool, attend, batch_of, random_sequence

GEOMETRY = Geometry(num_heads=4, num_kv_heads=2, head_dim=16)


def beside_wrong_tables(batch: AttentionBatch) -> AttentionBatch:
    """Group 1 of three is the batch; the tables of the others name block 0 everywhere."""
    table = batch.block_tables[0]
    wrong = np.zeros_like(table)
    return replace(batch, block_tables=np.stack([wrong, table, wrong]))


@pytest.mark.parametrize("implementation", [NativeOps, ReferenceOps])
def test_attention_and_writes_go_by_the_layers_group(implementation: type[Ops]) -> None:
    ops = implementation()
    pools = [Pool(GEOMETRY, 8, seed=1) for _ in range(2)]
    q, k, v = random_sequence(GEOMETRY, 40, seed=2)
    stored = [pool.add(q, k, v) for pool in pools]
    alone = attend(ops, pools[0], [Piece(stored[0], 20, 40)])
    batch = beside_wrong_tables(batch_of([Piece(stored[1], 20, 40)]))
    kv = replace(pools[1].kv, group=1)
    out = np.empty_like(alone)
    ops.paged_attention(q[20:], batch, kv, 0.25, out)
    np.testing.assert_array_equal(out, alone)

    qkv = np.random.default_rng(3).standard_normal((20, 8 * 16)).astype(np.float32)
    rope = RopeTable(np.ones((64, 8), np.float32), np.zeros((64, 8), np.float32))
    ops.rope_write(qkv, batch_of([Piece(stored[0], 20, 40)]), rope, pools[0].kv, np.empty((20, 4, 16), np.float32))
    ops.rope_write(qkv, batch, rope, kv, np.empty((20, 4, 16), np.float32))
    np.testing.assert_array_equal(pools[0].kv.pool, pools[1].kv.pool)
