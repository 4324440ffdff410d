"""Operations that do several at once: their bits are those of the operations that they stand for."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kernels.native import NativeOps, supported_instruction_sets
from octavo.kernels.ops import F32, AttentionBatch, AttentionProjection, RopeTable
from octavo.kernels.reference import ReferenceOps
from tests.kernels.paged_case import Geometry, Pool

GEOMETRY = Geometry(num_heads=4, num_kv_heads=2, head_dim=32)
WIDTH, INNER, EPS = 96, 160, 1e-5
ROWS = [1, 3, 40]


def normal(*shape: int, seed: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def batch_of(rows: int) -> AttentionBatch:
    """One sequence from position 5 on, in blocks 1, 2, 3."""
    tables = np.array([[[1, 2, 3]]], np.int32)
    return AttentionBatch(np.array([0, rows], np.int32), np.array([5], np.int32), tables)


def projection_of(ops: NativeOps | ReferenceOps, weights_dtype: str, *, head_norms: bool) -> AttentionProjection:
    qkv = ops.pack_linear(normal(8 * 32, WIDTH, seed=1), normal(8 * 32, seed=2), weights_dtype)
    norms = (normal(32, seed=3), normal(32, seed=4)) if head_norms else (None, None)
    return AttentionProjection(normal(WIDTH, seed=5), EPS, qkv, *norms)


def rope_table() -> RopeTable:
    angles = np.arange(64, dtype=np.float32)[:, None] * (0.5 ** np.arange(16, dtype=np.float32))
    return RopeTable(np.cos(angles), np.sin(angles))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize("weights_dtype", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
def test_attention_input_is_norm_linear_and_rope_write(
    instruction_set: str, weights_dtype: str, head_norms: bool, rows: int
) -> None:
    ops = NativeOps(2, instruction_set)
    projection, x = projection_of(ops, weights_dtype, head_norms=head_norms), normal(rows, WIDTH, seed=6)
    fused, apart = Pool(GEOMETRY, 4), Pool(GEOMETRY, 4)
    fused_q, q = np.empty((2, rows, 4, 32), np.float32)
    ops.attention_input(x, projection, batch_of(rows), rope_table(), fused.kv, fused_q)

    normed, qkv = np.empty_like(x), np.empty((rows, 8 * 32), np.float32)
    ops.rms_norm(x, projection.norm, EPS, normed)
    ops.linear(normed, projection.qkv, qkv)
    norms = {"q_norm": projection.q_norm, "k_norm": projection.k_norm}
    ops.rope_write(qkv, batch_of(rows), rope_table(), apart.kv, q, **norms, norm_eps=EPS)
    assert fused_q.tobytes() == q.tobytes()
    assert fused.kv.pool.tobytes() == apart.kv.pool.tobytes()


@pytest.mark.parametrize("rows", [*ROWS, 11, 200])
@pytest.mark.parametrize("weights_dtype", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
@pytest.mark.parametrize("inner_width", [INNER, INNER - 6])  # whole panels, and not
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_mlp_is_its_parts(
    instruction_set: str, weights_dtype: str, rows: int, inner_width: int, has_bias: bool
) -> None:
    ops = NativeOps(2, instruction_set)
    bias = normal(2 * inner_width, seed=6) if has_bias else None
    gate_up = ops.pack_linear(normal(2 * inner_width, WIDTH, seed=1), bias, weights_dtype)
    down = ops.pack_linear(normal(WIDTH, inner_width, seed=2), normal(WIDTH, seed=3), weights_dtype)
    norm, hidden = normal(WIDTH, seed=4), normal(rows, WIDTH, seed=5)
    fused, apart = hidden.copy(), hidden.copy()
    ops.gated_mlp(fused, norm, EPS, gate_up, down)

    normed, both, inner = (
        np.empty_like(hidden),
        np.empty((rows, 2 * inner_width), np.float32),
        np.empty((rows, inner_width), np.float32),
    )
    ops.rms_norm(hidden, norm, EPS, normed)
    ops.linear(normed, gate_up, both)
    ops.silu_mul(both, inner)
    ops.linear(inner, down, apart, accumulate=True)
    assert fused.tobytes() == apart.tobytes()
    assert not np.array_equal(fused, hidden)


@pytest.mark.parametrize("rows", ROWS)
def test_native_means_what_the_reference_says(rows: int) -> None:
    x, results = normal(rows, WIDTH, seed=6), []
    for ops in (NativeOps(2, "portable"), ReferenceOps()):
        pool, q, hidden = Pool(GEOMETRY, 4, poison=0.0), np.empty((rows, 4, 32), np.float32), x.copy()
        ops.attention_input(x, projection_of(ops, "f32", head_norms=True), batch_of(rows), rope_table(), pool.kv, q)
        gate_up = ops.pack_linear(normal(2 * INNER, WIDTH, seed=1) / 9, None, "f32")
        down = ops.pack_linear(normal(WIDTH, INNER, seed=2) / 9, None, "f32")
        ops.gated_mlp(hidden, normal(WIDTH, seed=4), EPS, gate_up, down)
        logits = np.empty((rows, 2 * INNER), np.float32)
        ops.norm_linear(hidden, normal(WIDTH, seed=4), EPS, gate_up, logits)
        results.append((q, pool.kv.pool.view(np.float32), hidden, logits))
    for native, reference in zip(*results, strict=True):
        np.testing.assert_allclose(native, reference, atol=2e-5, rtol=2e-5)


def test_shapes_that_do_not_fit_are_refused() -> None:
    ops, x = NativeOps(1), normal(3, WIDTH, seed=1)
    gate_up = ops.pack_linear(normal(2 * INNER, WIDTH, seed=1), None, "f32")
    narrow = ops.pack_linear(normal(WIDTH, INNER - 1, seed=1), None, "f32")
    with pytest.raises(ValueError, match="twice what down takes"):
        ops.gated_mlp(x, normal(WIDTH, seed=2), EPS, gate_up, narrow)
    with pytest.raises(ValueError, match="one number a column"):
        ops.norm_linear(x, normal(WIDTH - 1, seed=2), EPS, gate_up, np.empty((3, 2 * INNER), np.float32))
    with pytest.raises(ValueError, match="out must be"):
        ops.norm_linear(x, normal(WIDTH, seed=2), EPS, gate_up, np.empty((3, INNER), np.float32))
