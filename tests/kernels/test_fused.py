"""Operations that do several at once: their bits are those of the operations that they stand for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from octavo.kernels.decoder_layer import run_layers
from octavo.kernels.native import NativeOps, supported_instruction_sets
from octavo.kernels.ops import (
    F32,
    AttentionBatch,
    AttentionProjection,
    DecoderLayer,
    DecoderRows,
    KVLayer,
    PackedLinear,
    RopeTable,
)
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


@pytest.mark.parametrize("rows", [*ROWS, 200])
@pytest.mark.parametrize("gate", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
def test_gated_mlp_with_a_norm_behind_is_its_parts(instruction_set: str, gate: str, rows: int) -> None:
    ops = NativeOps(2, instruction_set)
    gate_up = ops.pack_linear(normal(2 * INNER, WIDTH, seed=1), None, "int8")
    down = ops.pack_linear(normal(WIDTH, INNER, seed=2), None, "int8")
    norm, post_norm, hidden = normal(WIDTH, seed=4), normal(WIDTH, seed=7), normal(rows, WIDTH, seed=5)
    fused, apart = hidden.copy(), hidden.copy()
    ops.gated_mlp(fused, norm, EPS, gate_up, down, gate=gate, post_norm=post_norm)

    both, inner, added = (np.empty((rows, width), np.float32) for width in (2 * INNER, INNER, WIDTH))
    ops.norm_linear(hidden, norm, EPS, gate_up, both)
    ops.gated_activation(both, gate, inner)
    ops.linear(inner, down, added)
    ops.rms_norm(added, post_norm, EPS, added)
    apart += added
    assert fused.tobytes() == apart.tobytes()


def decoder_layers_of(ops: NativeOps | ReferenceOps, weights_dtype: str) -> tuple[DecoderLayer, ...]:
    """One as Llama has it, one with all that Gemma has, and one with a window and the other rope."""

    def matrix(num_outputs: int, num_inputs: int, seed: int) -> PackedLinear:
        return ops.pack_linear(normal(num_outputs, num_inputs, seed=seed) / 9, None, weights_dtype)

    def layer(seed: int, *, is_normed: bool, **more: Any) -> DecoderLayer:
        norms = [normal(size, seed=seed + i) for i, size in enumerate((WIDTH, WIDTH, 32, 32, WIDTH, WIDTH))]
        head_norms = norms[2:4] if is_normed else (None, None)
        post_norms = norms[4:] if is_normed else (None, None)
        return DecoderLayer(
            attention=AttentionProjection(norms[0], EPS, matrix(8 * 32, WIDTH, seed), *head_norms),
            output=matrix(WIDTH, 4 * 32, seed + 1),
            mlp_norm=norms[1],
            gate_up=matrix(2 * INNER, WIDTH, seed + 2),
            down=matrix(WIDTH, INNER, seed + 3),
            scale=0.2,
            post_attention_norm=post_norms[0],
            post_mlp_norm=post_norms[1],
            **more,
        )

    return (
        layer(10, is_normed=False),
        layer(20, is_normed=True, softcap=5.0, gate="gelu_tanh"),
        layer(30, is_normed=False, window=7, rope=1, gate="gelu"),
    )


@dataclass(frozen=True)
class LayersRun:
    """What layers make of the same rows, in pools of their own."""

    hidden: F32
    pools: tuple[Pool, ...]

    def bits(self) -> list[bytes]:
        return [self.hidden.tobytes(), *(pool.kv.pool.tobytes() for pool in self.pools)]


def rows_of(rows: int, table: RopeTable) -> DecoderRows:
    heads = np.empty((rows, 4, 32), np.float32)
    return DecoderRows(normal(rows, WIDTH, seed=6), batch_of(rows), (table, RopeTable(table.sin, table.cos)), heads)


def run(
    ops: Any,
    layers: tuple[DecoderLayer, ...],
    rows: int,
    *,
    is_fused: bool,
    count: int = 3,
    table: RopeTable | None = None,
) -> LayersRun:
    pools = tuple(Pool(GEOMETRY, 4, poison=0.0) for _ in layers)
    given = rows_of(rows, table or rope_table())
    kv_layers = tuple(pool.kv for pool in pools)
    if is_fused:
        ops.decoder_layers(layers, kv_layers, count, given)
    else:
        run_layers(ops, layers, kv_layers, count, given)
    return LayersRun(given.hidden, pools)


@pytest.mark.parametrize("rows", [*ROWS, 17, 43])
@pytest.mark.parametrize("weights_dtype", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
def test_decoder_layers_are_their_operations(instruction_set: str, weights_dtype: str, rows: int) -> None:
    ops = NativeOps(2, instruction_set)
    layers = decoder_layers_of(ops, weights_dtype)
    apart = run(ops, layers, rows, is_fused=False)
    assert np.isfinite(apart.hidden).all()
    assert run(ops, layers, rows, is_fused=True).bits() == apart.bits()
    assert (
        run(ops, layers, rows, is_fused=True, count=2).bits() == run(ops, layers, rows, is_fused=False, count=2).bits()
    )
    assert run(ops, layers, rows, is_fused=True, count=0).hidden.tobytes() == normal(rows, WIDTH, seed=6).tobytes()


def test_decoder_layers_mean_what_the_reference_says() -> None:
    native, reference = (
        run(ops, decoder_layers_of(ops, "f32"), 3, is_fused=True) for ops in (NativeOps(2, "portable"), ReferenceOps())
    )
    np.testing.assert_allclose(native.hidden, reference.hidden, atol=1e-4, rtol=1e-4)


def test_other_layers_and_other_places_are_noticed() -> None:
    """What was made ready for the last layers and their K and V is used again, and not for others."""
    ops, alone = NativeOps(1), NativeOps(1)
    first, second = decoder_layers_of(ops, "f32"), decoder_layers_of(ops, "int8")
    layer_bytes = 2 * 16 * 2 * 32 * 4
    blocks = np.zeros(4 * 3 * layer_bytes, np.uint8)

    def places(order: list[int]) -> tuple[KVLayer, ...]:
        return tuple(KVLayer(blocks, 3 * layer_bytes, index * layer_bytes, 16, 2, 32, "f32") for index in order)

    one, other = places([0, 1, 2]), places([2, 0, 1])
    for layers, kv_layers in ((first, one), (second, one), (second, other), (second, other), (first, one)):
        blocks.fill(0)
        fused = rows_of(3, rope_table())
        ops.decoder_layers(layers, kv_layers, 3, fused)
        written = blocks.tobytes()
        blocks.fill(0)
        apart = rows_of(3, rope_table())
        run_layers(alone, layers, kv_layers, 3, apart)
        assert fused.hidden.tobytes() == apart.hidden.tobytes()
        assert written == blocks.tobytes()


@pytest.mark.parametrize("change", [np.float64, np.asfortranarray])
def test_ropes_in_another_layout_give_the_same_bits(change: Any) -> None:
    ops, table = NativeOps(1), rope_table()
    layers = decoder_layers_of(ops, "f32")
    changed = RopeTable(change(table.cos), change(table.sin))
    assert run(ops, layers, 3, is_fused=True, table=changed).bits() == run(ops, layers, 3, is_fused=True).bits()


def test_decoder_layers_that_cannot_be_are_refused() -> None:
    ops = NativeOps(1)
    (layer, *_) = decoder_layers_of(ops, "f32")
    wrong = {
        "take and give what hidden has": {"output": ops.pack_linear(normal(WIDTH - 1, 128, seed=1), None, "f32")},
        "one number a column": {"mlp_norm": normal(WIDTH + 1, seed=1)},
        "twice what down takes": {"down": ops.pack_linear(normal(WIDTH, INNER + 1, seed=1), None, "f32")},
        "'relu' of an MLP is not one of silu, gelu, gelu_tanh": {"gate": "relu"},
        "'clamped_swiglu' of an MLP is not one of": {"gate": "clamped_swiglu"},
        "0 \\(none\\) or more": {"window": -1},
        "not among those of the step": {"rope": 2},
        "qkv must give": {"output": ops.pack_linear(normal(WIDTH, 96, seed=1), None, "f32")},
        "must take whole heads": {"output": ops.pack_linear(normal(WIDTH, 97, seed=1), None, "f32")},
        "must be .head_dim.": {"attention": replace(layer.attention, k_norm=normal(31, seed=1))},
    }
    for words, changed in wrong.items():
        with pytest.raises(ValueError, match=words):
            run(ops, (replace(layer, **changed),), 3, is_fused=True, count=1)
    with pytest.raises(ValueError, match="fewer layers"):
        run(ops, (layer,), 3, is_fused=True, count=2)


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
    down = ops.pack_linear(normal(WIDTH, INNER, seed=1), None, "f32")
    with pytest.raises(ValueError, match="one number a column of hidden"):
        ops.gated_mlp(x, normal(WIDTH, seed=2), EPS, gate_up, down, post_norm=normal(WIDTH - 1, seed=2))
    reference = ReferenceOps()
    packed = reference.pack_linear(normal(WIDTH, INNER, seed=1), None, "f32")
    with pytest.raises(ValueError, match="'relu' of an MLP is not one of silu, gelu, gelu_tanh"):
        ops.gated_mlp(x, normal(WIDTH, seed=2), EPS, gate_up, down, gate="relu")
    with pytest.raises(ValueError, match="'relu' of an MLP is not one of silu, gelu, gelu_tanh"):
        reference.gated_mlp(x, normal(WIDTH, seed=2), EPS, packed, packed, gate="relu")
    with pytest.raises(ValueError, match="one number a column"):
        ops.norm_linear(x, normal(WIDTH - 1, seed=2), EPS, gate_up, np.empty((3, 2 * INNER), np.float32))
    with pytest.raises(ValueError, match="out must be"):
        ops.norm_linear(x, normal(WIDTH, seed=2), EPS, gate_up, np.empty((3, INNER), np.float32))
