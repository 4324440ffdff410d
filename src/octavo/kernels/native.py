"""The operations in C++, for the best instruction set that this machine has. It knows nothing of models.

`NativeOps` owns a thread pool and scratch memory; several of them may live in one process. Calls release the GIL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.seeds import MASK
from octavo.errors import ConfigError, KernelError
from octavo.kernels.ops import (
    F32,
    F64,
    I32,
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

try:
    from octavo.kernels import _native
except ImportError as error:
    raise KernelError(
        f"the native kernels cannot be loaded ({error}); install octavo with `pip install .` (it needs a C++17 "
        "compiler), or run `make native` in a checkout"
    ) from error


def supported_instruction_sets() -> list[str]:
    """Those that were compiled in and that this processor has, best first."""
    return _native.supported_instruction_sets()


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class NativeOps:
    """`ops.Ops` in C++.

    `num_threads` 0 means one per usable core. `spin_pauses` bounds how long an idle thread spins before it sleeps (a
    pause is about 25 ns), but behind a long run it may spin for a small share of that run.
    """

    def __init__(self, num_threads: int = 0, instruction_set: str = "auto", spin_pauses: int = 400) -> None:
        if not 0 <= num_threads <= 1024:
            raise ConfigError(f"--threads is {num_threads}; it must be 0 (one per core) to 1024")
        supported = supported_instruction_sets()
        if instruction_set != "auto" and instruction_set not in supported:
            raise ConfigError(
                f"--instruction-set {instruction_set!r} cannot be had; this machine has: auto, {', '.join(supported)}"
            )
        self._kernels = _start(num_threads or usable_cores(), instruction_set, spin_pauses)
        # One per layer of the last pool, which they keep alive.
        self._pool: U8 | None = None
        self._views: dict[tuple[int, int], tuple[KVLayer, _native.KVView]] = {}

        self._stack: _Stack | None = None  # of the last layers, which it keeps alive with their pool
        self._batch: AttentionBatch | None = None  # the last one, and its views by KV group
        self._batch_views: dict[tuple[int, int], _native.BatchView] = {}

    @property
    def instruction_set(self) -> str:
        return self._kernels.instruction_set

    @property
    def num_threads(self) -> int:
        return self._kernels.num_threads

    @property
    def scratch_bytes(self) -> int:
        """Held for attention and draws: the most that a call has needed so far."""
        return self._kernels.scratch_bytes

    def pack_linear(self, weight: F32, bias: F32 | None, weights_dtype: str) -> PackedLinear:
        return self._kernels.pack_linear(weight, bias, weights_dtype)

    def pack_blocks(self, blocks: U8, bias: F32 | None, kind: str) -> PackedLinear:
        return self._kernels.pack_blocks(blocks, bias, kind)

    def linear(self, x: F32, weight: PackedLinear, out: F32, *, accumulate: bool = False) -> None:
        assert isinstance(weight, _native.Linear)
        self._kernels.linear(x, weight, out, accumulate)

    def embedding(self, table: PackedLinear, token_ids: I32, out: F32) -> None:
        assert isinstance(table, _native.Linear)
        self._kernels.embedding(table, token_ids, out)

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32, *, accumulate: bool = False) -> None:
        self._kernels.rms_norm(x, weight, eps, out, accumulate)

    def silu_mul(self, gate_up: F32, out: F32) -> None:
        self._kernels.silu_mul(gate_up, out)

    def layer_norm(self, x: F32, weight: F32, bias: F32 | None, eps: float, out: F32) -> None:
        self._kernels.layer_norm(x, weight, bias, eps, out)

    def activation(self, x: F32, kind: str, out: F32) -> None:
        self._kernels.activation(x, kind, out)

    def gated_activation(self, gate_up: F32, kind: str, out: F32, *, limit: float = 0.0) -> None:
        self._kernels.gated_activation(gate_up, kind, limit, out)

    def softmax(self, x: F32, out: F32) -> None:
        self._kernels.softmax(x, out)

    def soft_cap(self, x: F32, cap: float, out: F32) -> None:
        self._kernels.soft_cap(x, cap, out)

    def rotate(self, heads: F32, positions: I32, rope: RopeTable, first: int = 0) -> None:
        self._kernels.rotate(heads, positions, rope.cos, rope.sin, first)

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
        view, kernels = self._batch_view(batch, kv), self._kernels
        kernels.rope_write(qkv, view, rope.cos, rope.sin, self._view(kv), out_q, q_norm, k_norm, norm_eps)

    def attention_input(
        self, x: F32, projection: AttentionProjection, batch: AttentionBatch, rope: RopeTable, kv: KVLayer, out_q: F32
    ) -> None:
        p, qkv = projection, projection.qkv
        assert isinstance(qkv, _native.Linear)
        view, table = self._view(kv), self._batch_view(batch, kv)
        self._kernels.attention_input(x, p.norm, p.eps, qkv, table, rope.cos, rope.sin, view, out_q, p.q_norm, p.k_norm)

    def norm_linear(self, x: F32, norm: F32, eps: float, weight: PackedLinear, out: F32) -> None:
        assert isinstance(weight, _native.Linear)
        self._kernels.norm_linear(x, norm, eps, weight, out)

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
        assert isinstance(gate_up, _native.Linear)
        assert isinstance(down, _native.Linear)
        self._kernels.gated_mlp(hidden, norm, eps, gate_up, down, gate, post_norm)

    def decoder_layers(
        self, layers: Sequence[DecoderLayer], kv_layers: Sequence[KVLayer], count: int, rows: DecoderRows
    ) -> None:
        batch = rows.batch
        assert not batch.weighed
        assert batch.heard is None
        stack = self._stack
        if stack is None or stack.layers is not layers or stack.kv_layers is not kv_layers:
            stack = self._stack = _make_stack(layers, kv_layers, self._view)
        views = [self._batch_view(batch, kv) for kv in stack.one_of_each_table]
        ropes = [part for rope in rows.ropes for part in (rope.cos, rope.sin)]
        self._kernels.decoder_layers(stack.native, count, rows.hidden, views, ropes, rows.heads)

    def latent_write(self, latent: F32, batch: AttentionBatch, kv: KVLayer) -> None:
        self._kernels.latent_write(latent, self._batch_view(batch, kv), self._view(kv))

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
        table, view = self._batch_view(batch, kv), self._view(kv)
        self._kernels.paged_attention(q, table, view, scale, out, window, softcap, sinks)

    def attention_mass(
        self, q: F32, batch: AttentionBatch, kv: KVLayer, scale: float, rows: WeighedRows, layer: int
    ) -> None:
        table, view = self._batch_view(batch, kv), self._view(kv)
        self._kernels.attention_mass(q, table, view, scale, rows.sequence, rows.first, rows.mass[layer])

    def latent_attention(self, q: F32, batch: AttentionBatch, kv: KVLayer, rank: int, scale: float, out: F32) -> None:
        table, view = self._batch_view(batch, kv), self._view(kv)
        self._kernels.latent_attention(q, table, view, rank, scale, out)

    def draw(self, logits: F32, rows: I32, settings: F64, must_be_finite: bool, out: I32) -> None:
        self._kernels.draw(logits, rows, settings, must_be_finite, out)

    def uniform_numbers(self, seeds: list[int], positions: list[int], second_key: int) -> F64:
        out = np.empty(len(seeds))
        counters = np.array([position & MASK for position in positions], np.uint64)
        _native.uniform(counters, np.array([seed & MASK for seed in seeds], np.uint64), second_key, out)
        return out

    def copy_blocks(self, pool: U8, block_bytes: int, sources: I32, targets: I32) -> None:
        self._kernels.copy_blocks(pool, block_bytes, sources, targets)

    def _batch_view(self, batch: AttentionBatch, kv: KVLayer) -> _native.BatchView:
        """Checked once a step: the layers of a group have one view (one for each group that their tails are in)."""
        if self._batch is not batch:
            self._batch, self._batch_views = batch, {}
        group, tail = _tables_of(kv)
        found = self._batch_views.get((group, tail))
        if found is None:
            tables = (batch.block_tables[group], None if tail < 0 else batch.block_tables[tail])
            arrays = (batch.query_start, batch.slots, batch.start_position)
            found = self._batch_views[group, tail] = _native.make_batch_view(*arrays, *tables)
        return found

    def _view(self, kv: KVLayer) -> _native.KVView:
        key = (id(kv), kv.layer_offset)
        found = self._views.get(key)
        if found is None or found[0] is not kv:
            if self._pool is not kv.pool:  # another cache: the views of the last one would keep its pool alive
                self._pool, self._views, self._stack = kv.pool, {}, None
            view = _native.make_kv_view(
                kv.pool,
                kv.block_bytes,
                kv.layer_offset,
                kv.block_size,
                kv.num_kv_heads,
                kv.head_dim,
                kv.kv_format,
                kv.kind,
                kv.k_scales,
                kv.v_scales,
                kv.k_means,
                kv.is_turned,
                kv.k_feedback,
                -1 if kv.tail is None else kv.tail.layer_offset,
            )
            found = self._views[key] = (kv, view)
        return found[1]


@dataclass(frozen=True, slots=True)
class _Stack:
    """Layers as the kernels hold them."""

    layers: Sequence[DecoderLayer]
    kv_layers: Sequence[KVLayer]
    native: _native.LayerStack
    one_of_each_table: tuple[KVLayer, ...]  # layers; those of one table have a view of the batch in common


def _make_stack(
    layers: Sequence[DecoderLayer], kv_layers: Sequence[KVLayer], view_of: Callable[[KVLayer], _native.KVView]
) -> _Stack:
    native, tables = _native.LayerStack(), dict[tuple[int, int], KVLayer]()
    for layer, kv in zip(layers, kv_layers, strict=True):
        key, p = _tables_of(kv), layer.attention
        tables.setdefault(key, kv)
        assert isinstance(p.qkv, _native.Linear)
        assert isinstance(layer.output, _native.Linear)
        assert isinstance(layer.gate_up, _native.Linear)
        assert isinstance(layer.down, _native.Linear)
        native.add(
            p.norm,
            p.eps,
            p.qkv,
            p.q_norm,
            p.k_norm,
            layer.output,
            layer.post_attention_norm,
            layer.mlp_norm,
            layer.gate_up,
            layer.down,
            layer.post_mlp_norm,
            layer.gate,
            layer.scale,
            layer.window,
            layer.softcap,
            view_of(kv),
            list(tables).index(key),
            layer.rope,
        )
    return _Stack(layers, kv_layers, native, tuple(tables.values()))


def _tables_of(kv: KVLayer) -> tuple[int, int]:
    """The KV group of a layer, and that of its tail: layers that have both in common have one view of a batch."""
    return kv.group, -1 if kv.tail is None else kv.tail.group


def _start(num_threads: int, instruction_set: str, spin_pauses: int) -> _native.Kernels:
    try:
        return _native.Kernels(num_threads, instruction_set, spin_pauses)
    except RuntimeError as error:
        raise KernelError(
            f"{num_threads} threads cannot be started ({error}); lower --threads, or raise the machine's limit"
        ) from error
