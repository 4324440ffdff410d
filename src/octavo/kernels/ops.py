"""The operations that a model file may use, and the data that crosses into them.

Two implementations: `native.NativeOps` (C++) and `reference.ReferenceOps` (numpy, the meaning of each operation).
All activations are float32, C-contiguous. No operation reads or changes an array after it has returned;
`decoder_layers` keeps the last layers and their pool alive.

Law 1 is kept here: every output row of every operation is computed in an order that depends on that row alone, so the
number of rows, their neighbours and the number of threads never change a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
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
    layout of `octavo.kv_formats.<kv_format>`; of kind "latent": [block_size / 16][K tile], one vector a token.
    """

    pool: U8  # [num_blocks * block_bytes]
    block_bytes: int
    layer_offset: int
    block_size: int  # a multiple of 16
    num_kv_heads: int
    head_dim: int  # a multiple of 16, at most 256; of a latent (rank + rope) at most 640
    kv_format: str  # one of octavo.core.kv_bytes.FORMAT_BYTES
    group: int = 0  # the KV group of the layer: which block table is its
    kind: str = "pair"  # or "latent", or "tail": [num_kv_heads][block_size / 16][K tile]
    # [num_kv_heads, head_dim]: what is stored is divided by it (fp8 formats and int8, of kind "pair"); both or neither
    k_scales: F32 | None = None
    v_scales: F32 | None = None
    # [num_kv_heads, head_dim]: taken from K before that. Kernels do not add them again: no softmax sees what the scores
    # of a row have in common; so they go with neither soft cap nor sinks.
    k_means: F32 | None = None
    is_turned: bool = False  # before they are rounded, V and, without a tail, K are turned (`kv_formats.hadamard`)
    k_feedback: F32 | None = None  # [num_kv_heads, head_dim, head_dim], of fp8 formats: see `kv_formats.feedback`
    # Formats that quantise K by whole tiles: where a row reads K of its own tile, in blocks of another group (bf16).
    tail: KVLayer | None = None


MASS_UNITS = 1 << 40  # what an attention weight of 1 counts in `Ops.attention_mass`


@dataclass(frozen=True, slots=True)
class WeighedRows:
    """Rows of one sequence of a step whose attention is counted: those from its `first` on. `mass` grows by it."""

    sequence: int
    first: int
    mass: I64  # [num_layers, num_kv_heads, the slots that the sequence fills in this step]


@dataclass(frozen=True, slots=True)
class HeardQueries:
    """What the queries of all rows so far are: for calibration. `products` grows by each step."""

    products: list[F64]  # of each layer [num_kv_heads, head_dim, head_dim]: over rows and the query heads of a KV head

    def add(self, q: F32, layer: int) -> None:
        """q [num_tokens, num_heads, head_dim]"""
        num_kv_heads, head_dim, _ = self.products[layer].shape
        heads = q.reshape(len(q), num_kv_heads, -1, head_dim).transpose(1, 0, 2, 3).reshape(num_kv_heads, -1, head_dim)
        self.products[layer] += heads.transpose(0, 2, 1) @ heads


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
    # [num_sequences], the slot of the sequence's first row, counted through its block table; later rows follow. It is
    # the position less what the sequence has dropped; None: nobody has dropped anything. Rotations go by the position.
    start_slot: I32 | None = None
    weighed: tuple[WeighedRows, ...] = ()  # whose attention the forward pass counts, by `Ops.attention_mass`
    heard: HeardQueries | None = None  # where the forward pass adds the queries of all rows

    @property
    def slots(self) -> I32:
        return self.start_position if self.start_slot is None else self.start_slot


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


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """Attention and a gated MLP, each behind a norm of the hidden state, to which they are added.

    q, k and v come from `attention`; of its kind "pair".
    """

    attention: AttentionProjection
    output: PackedLinear  # num_heads * head_dim -> hidden_size
    mlp_norm: F32  # [hidden_size]
    gate_up: PackedLinear  # hidden_size -> gate | up
    down: PackedLinear  # intermediate_size -> hidden_size
    scale: float  # of scores
    window: int = 0  # as for `Ops.paged_attention`
    softcap: float = 0.0
    gate: str = "silu"  # as for `Ops.gated_mlp`
    post_attention_norm: F32 | None = None  # [hidden_size]: RMS norms of what is added
    post_mlp_norm: F32 | None = None
    rope: int = 0  # which of the step's tables


@dataclass(frozen=True, slots=True, eq=False)
class DecoderRows:
    """The rows of a step on their way through the layers, with the memory that a layer needs."""

    hidden: F32  # [num_tokens, hidden_size], changed by each layer
    batch: AttentionBatch
    ropes: Sequence[RopeTable]
    heads: F32  # [num_tokens, num_heads, head_dim]: a layer writes its queries there, and over them what they attend to


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
        With int8 and int4 weights, x is rounded to int8 in groups of 32, and to 15 bits in groups that are outlying in
        their row (`weight_groups.round_inputs`); a number of x that is not finite makes its whole row of out NaN.
        """
        ...

    def embedding(self, table: PackedLinear, token_ids: I32, out: F32) -> None:
        """out [m, num_inputs]: rows of the (possibly tied) matrix, widened to f32."""
        ...

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32, *, accumulate: bool = False) -> None:
        """out = x / sqrt(mean(x * x) + eps) * weight, row by row, out may be x; with accumulate, out += that."""
        ...

    def silu_mul(self, gate_up: F32, out: F32) -> None:
        """gate_up [m, 2 * n] = gate | up; out [m, n] = gate * sigmoid(gate) * up."""
        ...

    def layer_norm(self, x: F32, weight: F32, bias: F32 | None, eps: float, out: F32) -> None:
        """out = (x - mean) / sqrt(variance + eps) * weight + bias, row by row. out may be x."""
        ...

    def activation(self, x: F32, kind: str, out: F32) -> None:
        """Number by number; kind is "relu", "gelu" (with erf), "gelu_tanh" or "sigmoid". out may be x."""
        ...

    def gated_activation(self, gate_up: F32, kind: str, out: F32, *, limit: float = 0.0) -> None:
        """gate_up [m, 2 * n] = gate | up; out [m, n] = act(gate) * up; kind is "gelu", "gelu_tanh", "silu" or:

        "clamped_swiglu": with gate at most `limit` and up within +-limit, gate * sigmoid(1.702 gate) * (up + 1).
        """
        ...

    def softmax(self, x: F32, out: F32) -> None:
        """out = e^x / sum of e^x, row by row. out may be x."""
        ...

    def soft_cap(self, x: F32, cap: float, out: F32) -> None:
        """out = cap * tanh(x / cap), number by number; cap > 0. out may be x."""
        ...

    def rotate(self, heads: F32, positions: I32, rope: RopeTable, first: int = 0) -> None:
        """In place, heads [num_tokens, num_heads, dim]: the rope table's dimensions of each head, from `first` on."""
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
        """hidden += down of `silu_mul` of gate_up of `rms_norm`(hidden) in one call, with the same bits.

        gate "gelu" or "gelu_tanh": of `gated_activation` instead. post_norm: what is added goes through `rms_norm`.
        """
        ...

    def decoder_layers(
        self, layers: Sequence[DecoderLayer], kv_layers: Sequence[KVLayer], count: int, rows: DecoderRows
    ) -> None:
        """The first `count` layers, one after the other in one call: `decoder_layer.run_layers`, with the same bits.

        layers and kv_layers are known again as the same objects, so they must not change; others are prepared anew. The
        batch is not watched: it counts and hears nothing.
        """
        ...

    def latent_write(self, latent: F32, batch: AttentionBatch, kv: KVLayer) -> None:
        """Write latent [num_tokens, rank + rope] of every row (normed and rotated already) into its slot."""
        ...

    def paged_attention(
        self,
        q: F32,
        batch: AttentionBatch,
        kv: KVLayer,
        scale: float,
        out: F32,
        *,
        window: int = 0,  # tokens that a row reads, itself included; 0: all
        softcap: float = 0.0,  # c > 0: scores become c * tanh(score / c)
        sinks: F32 | None = None,  # [num_heads]: one more logit a head, without a value (gpt-oss)
    ) -> None:
        """out [num_tokens, num_heads, head_dim] = softmax(scale * q k) v over the positions that a row reads.

        Those are max(0, position - window + 1) to its own, inclusive. K and V of each must be written already. What
        lies in other slots (NaN, infinities, another sequence's values) never matters, and block table entries of
        blocks before the window are not read. Query head h reads KV head h // (num_heads / num_kv_heads). out may be q.
        """
        ...

    def attention_mass(
        self, q: F32, batch: AttentionBatch, kv: KVLayer, scale: float, rows: WeighedRows, layer: int
    ) -> None:
        """Add to rows.mass[layer] how much attention each slot gets from `rows`, in units of 1 / MASS_UNITS.

        Of each row and query head, softmax(scale * q k) over slots 0 to the row's own is rounded down to such units,
        and summed over the rows and the query heads of a KV head: whole numbers, whose sum depends on no order.
        """
        ...

    def latent_attention(self, q: F32, batch: AttentionBatch, kv: KVLayer, rank: int, scale: float, out: F32) -> None:
        """out [num_tokens, num_heads, rank] = softmax(scale * q latent) latent[:rank] over positions 0 to a row's own.

        q [num_tokens, num_heads, rank + rope]: multi-head latent attention in its absorbed form (DeepSeek-V2); rank is
        a multiple of 16.
        """
        ...

    def draw(self, logits: F32, rows: I32, settings: F64, must_be_finite: bool, out: I32) -> None:
        """out [m]: the id drawn from row rows[i] of logits [any, vocab_size], as `draw.draw_row` defines it.

        settings [m, 5]: temperature, top_k, top_p, min_p, number (`draw.DrawSettings`). out is -1 where the highest
        logit is not finite, or, with must_be_finite, any logit is not; without it there may be -inf, but no NaN.
        """
        ...

    def uniform_numbers(self, seeds: list[int], positions: list[int], second_key: int) -> F64:
        """The number in [0, 1) that each seed has at its position: 53 bits of Philox4x64-10 (core/seeds.py)."""
        ...

    def copy_blocks(self, pool: U8, block_bytes: int, sources: I32, targets: I32) -> None:
        """Copy whole blocks, one after the other in the order given."""
        ...
