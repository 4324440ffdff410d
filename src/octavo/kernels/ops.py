"""The operations that a model file may use, and the data that crosses into them.

Two implementations: `native.NativeOps` (C++) and `reference.ReferenceOps` (numpy, the meaning of each operation).
All activations are float32, C-contiguous. No operation keeps a reference to an array after it returns.

Law 1 is kept here: every output row of every operation is computed in an order that depends on that row alone, so the
number of rows, their neighbours and the number of threads never change a bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]


class PackedLinear(Protocol):
    """A weight matrix in the layout that the kernels read, with its bias if it has one. Immutable."""

    @property
    def num_outputs(self) -> int: ...
    @property
    def num_inputs(self) -> int: ...
    @property
    def weights_dtype(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class KVLayer:
    """Where one layer's K and V lie in the pool: block b's slice starts at `b * block_bytes + layer_offset`.

    Inside a layer's slice: [num_kv_heads][block_size / 16][K tile | V tile], a tile being 16 tokens of one head in the
    layout of `octavo.kv_formats.<kv_format>`.
    """

    pool: U8  # [num_blocks * block_bytes]
    block_bytes: int
    layer_offset: int
    block_size: int  # a multiple of 16
    num_kv_heads: int
    head_dim: int  # a multiple of 16, at most 256
    kv_format: str  # "f32" or "bf16"
    group: int = 0  # the KV group of the layer: which block table is its


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which sequence and positions the rows of a step belong to.

    Sequence i owns rows query_start[i] to query_start[i + 1]. The arrays do not change once a batch is made: what an
    operation has checked of them stays checked.
    """

    query_start: I32  # [num_sequences + 1], ascending from 0
    start_position: I32  # [num_sequences], position of the sequence's first row in this step
    # [num_groups, num_sequences, max_blocks], block ids; entries unused or behind a window are 0 and never read
    block_tables: I32


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin per position; rotates dimensions j and j + rotary_dim / 2 of each head ("rotate half").

    Dimensions from rotary_dim on pass through unchanged.
    """

    cos: F32  # [max_positions, rotary_dim / 2]
    sin: F32  # [max_positions, rotary_dim / 2]


@dataclass(frozen=True, slots=True)
class AttentionProjection:
    """From the hidden state to q, k and v: the first norm of a layer and its matrix. eps is of all the norms."""

    norm: F32  # [num_inputs]
    eps: float
    qkv: PackedLinear  # gives q | k | v
    q_norm: F32 | None = None  # as for `Ops.rope_write`
    k_norm: F32 | None = None


class Ops(Protocol):
    """The set that an executor must provide; small on purpose."""

    def pack_linear(self, weight: F32, bias: F32 | None, weights_dtype: str) -> PackedLinear:
        """weight [num_outputs, num_inputs]; weights_dtype "f32", "bf16", "int8" or "int4" (round to nearest even).

        int8 and int4 have one f32 scale for each group of 32 inputs of an output (`weight_groups`).
        """
        ...

    def pack_blocks(self, blocks: U8, bias: F32 | None, kind: str) -> PackedLinear:
        """GGUF blocks [num_outputs, bytes of a row], kind "q8_0", "q4_0" or "q4_1", without a second rounding."""
        ...

    def linear(self, x: F32, weight: PackedLinear, out: F32, *, accumulate: bool = False) -> None:
        """out [m, num_outputs] = x [m, num_inputs] @ weight.T + bias; with accumulate, that is added to out.

        With bf16 weights, x is rounded to bf16 first where the instruction set multiplies bf16, and not elsewhere.
        With int8 and int4 weights, x is rounded to int8 in groups of 32; a group of x with a number that is not finite
        makes its whole row of out NaN.
        """
        ...

    def embedding(self, table: PackedLinear, token_ids: I32, out: F32) -> None:
        """out [m, num_inputs]: rows of the (possibly tied) matrix, widened to f32."""
        ...

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32) -> None:
        """out = x / sqrt(mean(x * x) + eps) * weight, row by row. out may be x."""
        ...

    def silu_mul(self, gate_up: F32, out: F32) -> None:
        """gate_up [m, 2 * n] = gate | up; out [m, n] = gate * sigmoid(gate) * up."""
        ...

    def rope_write(
        self,
        qkv: F32,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] = q | k | v
        batch: AttentionBatch,
        rope: RopeTable,
        kv: KVLayer,
        out_q: F32,  # [num_tokens, num_heads, head_dim], rotated
        *,
        q_norm: F32 | None = None,  # [head_dim]: RMS norm of each head before the rotation (Qwen3)
        k_norm: F32 | None = None,
        norm_eps: float = 0.0,
    ) -> None:
        """Rotate q and k, and write k and v of every row into its slot of the pool in the KV format."""
        ...

    def attention_input(
        self, x: F32, projection: AttentionProjection, batch: AttentionBatch, rope: RopeTable, kv: KVLayer, out_q: F32
    ) -> None:
        """`rms_norm` of x, `linear` by qkv and `rope_write` in one call, with the same bits."""
        ...

    def norm_linear(self, x: F32, norm: F32, eps: float, weight: PackedLinear, out: F32) -> None:
        """`linear` of `rms_norm`(x) in one call, with the same bits."""
        ...

    def gated_mlp(self, hidden: F32, norm: F32, eps: float, gate_up: PackedLinear, down: PackedLinear) -> None:
        """hidden += down of `silu_mul` of gate_up of `rms_norm`(hidden) in one call, with the same bits."""
        ...

    def paged_attention(self, q: F32, batch: AttentionBatch, kv: KVLayer, scale: float, out: F32) -> None:
        """out [num_tokens, num_heads, head_dim] = softmax(scale * q k) v over positions 0 to the row's own, inclusive.

        K and V of every position read must be written already. What lies in other slots (NaN, infinities, another
        sequence's values) never matters. Query head h reads KV head h // (num_heads / num_kv_heads).
        """
        ...

    def copy_blocks(self, pool: U8, block_bytes: int, sources: I32, targets: I32) -> None:
        """Copy whole blocks, one after the other in the order given."""
        ...
