"""In numpy, what each operation means. Slow and plain; the native kernels are tested against it.

It does not promise the bits of the native kernels (the order of additions differs), only their meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.kernels import draw
from octavo.kernels.decoder_layer import run_layers
from octavo.kernels.ops import (
    F32,
    F64,
    I32,
    MASS_UNITS,
    U8,
    AttentionBatch,
    AttentionProjection,
    DecoderLayer,
    DecoderRows,
    KVLayer,
    PackedLinear,
    RopeTable,
    WeighedRows,
)
from octavo.kernels.weight_groups import Groups, multiply, read_blocks, round_groups
from octavo.kv_formats import bf16, layout


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    weight: F32  # [num_outputs, num_inputs], already rounded to weights_dtype
    bias: F32 | None
    weights_dtype: str
    groups: Groups | None = None  # of int8 and int4, where the products are defined by codes and scales

    @property
    def num_outputs(self) -> int:
        return int(self.weight.shape[0])

    @property
    def num_inputs(self) -> int:
        return int(self.weight.shape[1])

    @property
    def num_bytes(self) -> int:
        return int(self.weight.nbytes)


class ReferenceOps:
    """Every operation of `ops.Ops`, row by row."""

    def pack_linear(self, weight: F32, bias: F32 | None, weights_dtype: str) -> ReferenceLinear:
        if weights_dtype in ("int8", "int4"):
            return _of_groups(round_groups(weight, weights_dtype), bias, weights_dtype)
        if weights_dtype == "bf16":
            weight = bf16.round_trip(weight)
        return ReferenceLinear(np.ascontiguousarray(weight, np.float32), bias, weights_dtype)

    def pack_blocks(self, blocks: U8, bias: F32 | None, kind: str) -> ReferenceLinear:
        return _of_groups(read_blocks(blocks, kind), bias, "int8" if kind == "q8_0" else "int4")

    def linear(self, x: F32, weight: PackedLinear, out: F32, *, accumulate: bool = False) -> None:
        assert isinstance(weight, ReferenceLinear)
        result = x @ weight.weight.T if weight.groups is None else multiply(x, weight.groups)
        if weight.bias is not None:
            result += weight.bias
        out[...] = out + result if accumulate else result

    def embedding(self, table: PackedLinear, token_ids: I32, out: F32) -> None:
        assert isinstance(table, ReferenceLinear)
        out[...] = table.weight[token_ids]

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32, *, accumulate: bool = False) -> None:
        normed = _rms_norm(x, weight, eps)
        out[...] = out + normed if accumulate else normed

    def silu_mul(self, gate_up: F32, out: F32) -> None:
        gate, up = np.split(gate_up, 2, axis=-1)
        out[...] = gate / (1.0 + np.exp(-gate)) * up

    def layer_norm(self, x: F32, weight: F32, bias: F32 | None, eps: float, out: F32) -> None:
        centred = x - np.mean(x, axis=-1, keepdims=True, dtype=np.float32)
        variance = np.mean(centred * centred, axis=-1, keepdims=True, dtype=np.float32)
        normal = centred / np.sqrt(variance + np.float32(eps)) * weight
        out[...] = normal if bias is None else normal + bias

    def activation(self, x: F32, kind: str, out: F32) -> None:
        out[...] = _ACTIVATIONS[kind](x)

    def gated_activation(self, gate_up: F32, kind: str, out: F32, *, limit: float = 0.0) -> None:
        gate, up = np.split(gate_up, 2, axis=-1)
        if kind == "silu":
            self.silu_mul(gate_up, out)
        elif kind == "clamped_swiglu":
            gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, -limit, limit)
            out[...] = gate * _sigmoid(np.float32(1.702) * gate) * (up + 1)
        else:
            out[...] = _ACTIVATIONS[kind](gate) * up

    def softmax(self, x: F32, out: F32) -> None:
        powers = np.exp(x - x.max(axis=-1, keepdims=True))
        out[...] = powers / powers.sum(axis=-1, keepdims=True)

    def soft_cap(self, x: F32, cap: float, out: F32) -> None:
        out[...] = np.float32(cap) * np.tanh(x / np.float32(cap))

    def rotate(self, heads: F32, positions: I32, rope: RopeTable, first: int = 0) -> None:
        for row, position in enumerate(positions):
            heads[row, :, first:] = _rotate(heads[row, :, first:], rope, int(position))

    def rope_write(
        self,
        qkv: F32,
        batch: AttentionBatch,
        rope: RopeTable,
        kv: KVLayer,
        out_q: F32,
        *,
        q_norm: F32 | None = None,
        k_norm: F32 | None = None,
        norm_eps: float = 0.0,
    ) -> None:
        num_heads = out_q.shape[1]
        heads = qkv.reshape(len(qkv), -1, kv.head_dim)  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        q, k, v = np.split(heads, [num_heads, num_heads + kv.num_kv_heads], axis=1)
        if q_norm is not None:
            q = _rms_norm(q, q_norm, norm_eps)
        if k_norm is not None:
            k = _rms_norm(k, k_norm, norm_eps)
        dropped = batch.start_position - batch.slots
        for sequence, row, slot in _rows(batch):
            position = slot + int(dropped[sequence])
            out_q[row] = _rotate(q[row], rope, position)
            block_id = int(batch.block_tables[kv.group, sequence, slot // kv.block_size])
            tail_id = 0
            if kv.tail is not None:
                tail_id = int(batch.block_tables[kv.tail.group, sequence, slot // kv.block_size])
            layout.write_token(kv, block_id, slot % kv.block_size, _rotate(k[row], rope, position), v[row], tail_id)

    def attention_input(
        self, x: F32, projection: AttentionProjection, batch: AttentionBatch, rope: RopeTable, kv: KVLayer, out_q: F32
    ) -> None:
        projected = np.empty((len(x), projection.qkv.num_outputs), np.float32)
        self.norm_linear(x, projection.norm, projection.eps, projection.qkv, projected)
        norms = {"q_norm": projection.q_norm, "k_norm": projection.k_norm}
        self.rope_write(projected, batch, rope, kv, out_q, **norms, norm_eps=projection.eps)

    def norm_linear(self, x: F32, norm: F32, eps: float, weight: PackedLinear, out: F32) -> None:
        self.linear(_rms_norm(x, norm, eps), weight, out)

    def gated_mlp(
        self,
        hidden: F32,
        norm: F32,
        eps: float,
        gate_up: PackedLinear,
        down: PackedLinear,
        *,
        gate: str = "silu",
        post_norm: F32 | None = None,
    ) -> None:
        if gate not in ("silu", "gelu", "gelu_tanh"):
            raise ValueError(f"gate {gate!r} of an MLP is not one of silu, gelu, gelu_tanh")
        both = np.empty((len(hidden), gate_up.num_outputs), np.float32)
        inner = np.empty((len(hidden), down.num_inputs), np.float32)
        self.norm_linear(hidden, norm, eps, gate_up, both)
        self.gated_activation(both, gate, inner)
        if post_norm is None:
            self.linear(inner, down, hidden, accumulate=True)
            return
        added = np.empty_like(hidden)
        self.linear(inner, down, added)
        self.rms_norm(added, post_norm, eps, hidden, accumulate=True)

    def decoder_layers(
        self, layers: Sequence[DecoderLayer], kv_layers: Sequence[KVLayer], count: int, rows: DecoderRows
    ) -> None:
        run_layers(self, layers, kv_layers, count, rows)

    def latent_write(self, latent: F32, batch: AttentionBatch, kv: KVLayer) -> None:
        for sequence, row, position in _rows(batch):
            block_id = int(batch.block_tables[kv.group, sequence, position // kv.block_size])
            layout.write_latent(kv, block_id, position % kv.block_size, latent[row])

    def paged_attention(
        self,
        q: F32,
        batch: AttentionBatch,
        kv: KVLayer,
        scale: float,
        out: F32,
        *,
        window: int = 0,
        softcap: float = 0.0,
        sinks: F32 | None = None,
    ) -> None:
        group = q.shape[1] // kv.num_kv_heads
        for sequence, row, position in _rows(batch):
            first = max(0, position - window + 1) if window else 0
            table = batch.block_tables[kv.group, sequence]
            tail = None if kv.tail is None else batch.block_tables[kv.tail.group, sequence]
            k, v = layout.read_tokens(kv, table, position + 1, first, tail)  # [num_kv_heads, n, head_dim]
            heads = q[row].reshape(kv.num_kv_heads, group, kv.head_dim)
            scores = np.float32(scale) * np.einsum("hgd,hnd->hgn", heads, k)
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            logits = None if sinks is None else sinks.reshape(kv.num_kv_heads, group, 1)
            out[row] = np.einsum("hgn,hnd->hgd", _softmax(scores, logits), v).reshape(q.shape[1], kv.head_dim)

    def attention_mass(
        self, q: F32, batch: AttentionBatch, kv: KVLayer, scale: float, rows: WeighedRows, layer: int
    ) -> None:
        group, mass = q.shape[1] // kv.num_kv_heads, rows.mass[layer]
        table = batch.block_tables[kv.group, rows.sequence]
        first = int(batch.query_start[rows.sequence]) + rows.first
        for sequence, row, slot in _rows(batch):
            if sequence != rows.sequence or row < first:
                continue
            k, _ = layout.read_tokens(kv, table, slot + 1)
            heads = q[row].reshape(kv.num_kv_heads, group, kv.head_dim)
            weights = _softmax(np.float32(scale) * np.einsum("hgd,hnd->hgn", heads, k))
            mass[:, : slot + 1] += (weights * np.float32(MASS_UNITS)).astype(np.int64).sum(axis=1)

    def latent_attention(self, q: F32, batch: AttentionBatch, kv: KVLayer, rank: int, scale: float, out: F32) -> None:
        for sequence, row, position in _rows(batch):
            latents = layout.read_latents(kv, batch.block_tables[kv.group, sequence], position + 1)
            weights = _softmax(np.float32(scale) * (q[row] @ latents.T))
            out[row] = weights @ latents[:, :rank]

    def draw(self, logits: F32, rows: I32, settings: F64, must_be_finite: bool, out: I32) -> None:
        draw.draw(logits, rows, settings, must_be_finite, out)

    def uniform_numbers(self, seeds: list[int], positions: list[int], second_key: int) -> F64:
        return draw.uniform_numbers(seeds, positions, second_key)

    def copy_blocks(self, pool: U8, block_bytes: int, sources: I32, targets: I32) -> None:
        blocks = pool.reshape(-1, block_bytes)
        for source, target in zip(sources, targets, strict=True):
            blocks[target] = blocks[source]


def _sigmoid(x: F32) -> F32:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def _gelu(x: F32) -> F32:
    erf = np.array([math.erf(one / math.sqrt(2)) for one in x.ravel()]).reshape(x.shape)
    return np.asarray(0.5 * x * (1 + erf), np.float32)


def _gelu_tanh(x: F32) -> F32:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), np.float32)


_ACTIVATIONS: Mapping[str, Callable[[F32], F32]] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "sigmoid": _sigmoid,
}


def _of_groups(groups: Groups, bias: F32 | None, weights_dtype: str) -> ReferenceLinear:
    return ReferenceLinear(groups.values(), bias, weights_dtype, groups)


def _rows(batch: AttentionBatch) -> list[tuple[int, int, int]]:
    """(sequence, row, slot) of every row of a step; the slot is the position but where tokens were dropped."""
    found = []
    for sequence, start in enumerate(batch.slots):
        first, last = int(batch.query_start[sequence]), int(batch.query_start[sequence + 1])
        found += [(sequence, row, int(start) + row - first) for row in range(first, last)]
    return found


def _softmax(scores: F32, sinks: F32 | None = None) -> F32:
    """Over the last axis; a sink takes its share of the sum and has no weight."""
    largest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    return np.asarray(weights / (total if sinks is None else total + np.exp(sinks - largest)), np.float32)


def _rms_norm(x: F32, weight: F32, eps: float) -> F32:
    mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    return np.asarray(x / np.sqrt(mean + np.float32(eps)) * weight, np.float32)


def _rotate(heads: F32, rope: RopeTable, position: int) -> F32:
    half = rope.cos.shape[1]
    cos, sin = rope.cos[position], rope.sin[position]
    x1, x2 = heads[:, :half], heads[:, half : 2 * half]
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, heads[:, 2 * half :]], axis=1)
