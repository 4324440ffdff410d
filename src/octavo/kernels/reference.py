"""In numpy, what each operation means. Slow and plain; the native kernels are tested against it.

It does not promise the bits of the native kernels (the order of additions differs), only their meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.kernels.ops import F32, I32, U8, AttentionBatch, AttentionProjection, KVLayer, PackedLinear, RopeTable
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

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32) -> None:
        out[...] = _rms_norm(x, weight, eps)

    def silu_mul(self, gate_up: F32, out: F32) -> None:
        gate, up = np.split(gate_up, 2, axis=-1)
        out[...] = gate / (1.0 + np.exp(-gate)) * up

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
        for sequence, row, position in _rows(batch):
            out_q[row] = _rotate(q[row], rope, position)
            block_id = int(batch.block_tables[kv.group, sequence, position // kv.block_size])
            layout.write_token(kv, block_id, position % kv.block_size, _rotate(k[row], rope, position), v[row])

    def attention_input(
        self, x: F32, projection: AttentionProjection, batch: AttentionBatch, rope: RopeTable, kv: KVLayer, out_q: F32
    ) -> None:
        projected = np.empty((len(x), projection.qkv.num_outputs), np.float32)
        self.norm_linear(x, projection.norm, projection.eps, projection.qkv, projected)
        norms = {"q_norm": projection.q_norm, "k_norm": projection.k_norm}
        self.rope_write(projected, batch, rope, kv, out_q, **norms, norm_eps=projection.eps)

    def norm_linear(self, x: F32, norm: F32, eps: float, weight: PackedLinear, out: F32) -> None:
        self.linear(_rms_norm(x, norm, eps), weight, out)

    def gated_mlp(self, hidden: F32, norm: F32, eps: float, gate_up: PackedLinear, down: PackedLinear) -> None:
        both = np.empty((len(hidden), gate_up.num_outputs), np.float32)
        inner = np.empty((len(hidden), down.num_inputs), np.float32)
        self.norm_linear(hidden, norm, eps, gate_up, both)
        self.silu_mul(both, inner)
        self.linear(inner, down, hidden, accumulate=True)

    def paged_attention(self, q: F32, batch: AttentionBatch, kv: KVLayer, scale: float, out: F32) -> None:
        group = q.shape[1] // kv.num_kv_heads
        for sequence, row, position in _rows(batch):
            table = batch.block_tables[kv.group, sequence]
            k, v = layout.read_tokens(kv, table, position + 1)  # [num_kv_heads, n, head_dim]
            heads = q[row].reshape(kv.num_kv_heads, group, kv.head_dim)
            scores = scale * np.einsum("hgd,hnd->hgn", heads, k)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[row] = np.einsum("hgn,hnd->hgd", weights, v).reshape(q.shape[1], kv.head_dim)

    def copy_blocks(self, pool: U8, block_bytes: int, sources: I32, targets: I32) -> None:
        blocks = pool.reshape(-1, block_bytes)
        for source, target in zip(sources, targets, strict=True):
            blocks[target] = blocks[source]


def _of_groups(groups: Groups, bias: F32 | None, weights_dtype: str) -> ReferenceLinear:
    return ReferenceLinear(groups.values(), bias, weights_dtype, groups)


def _rows(batch: AttentionBatch) -> list[tuple[int, int, int]]:
    """(sequence, row, position) of every row of a step."""
    found = []
    for sequence, start in enumerate(batch.start_position):
        first, last = int(batch.query_start[sequence]), int(batch.query_start[sequence + 1])
        found += [(sequence, row, int(start) + row - first) for row in range(first, last)]
    return found


def _rms_norm(x: F32, weight: F32, eps: float) -> F32:
    mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    return np.asarray(x / np.sqrt(mean + np.float32(eps)) * weight, np.float32)


def _rotate(heads: F32, rope: RopeTable, position: int) -> F32:
    half = rope.cos.shape[1]
    cos, sin = rope.cos[position], rope.sin[position]
    x1, x2 = heads[:, :half], heads[:, half : 2 * half]
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, heads[:, 2 * half :]], axis=1)
