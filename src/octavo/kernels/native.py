"""The operations in C++, for the best instruction set that this machine has. It knows nothing of models.

`NativeOps` owns a thread pool and scratch memory; several of them may live in one process. Calls release the GIL.
"""

from __future__ import annotations

import os

from octavo.errors import ConfigError, KernelError
from octavo.kernels.ops import F32, I32, U8, AttentionBatch, AttentionProjection, KVLayer, PackedLinear, RopeTable

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
    pause is about 25 ns).
    """

    def __init__(self, num_threads: int = 0, instruction_set: str = "auto", spin_pauses: int = 200) -> None:
        if not 0 <= num_threads <= 1024:
            raise ConfigError(f"--threads is {num_threads}; it must be 0 (one per core) to 1024")
        supported = supported_instruction_sets()
        if instruction_set != "auto" and instruction_set not in supported:
            raise ConfigError(
                f"--instruction-set {instruction_set!r} cannot be had; this machine has: auto, {', '.join(supported)}"
            )
        self._kernels = _start(num_threads or usable_cores(), instruction_set, spin_pauses)
        # One per layer of a pool; keeps the pool alive as long as these operations.
        self._views: dict[tuple[int, int], tuple[KVLayer, _native.KVView]] = {}

        self._batch: AttentionBatch | None = None  # the last one, and its views by KV group
        self._batch_views: dict[int, _native.BatchView] = {}

    @property
    def instruction_set(self) -> str:
        return self._kernels.instruction_set

    @property
    def num_threads(self) -> int:
        return self._kernels.num_threads

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

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32) -> None:
        self._kernels.rms_norm(x, weight, eps, out)

    def silu_mul(self, gate_up: F32, out: F32) -> None:
        self._kernels.silu_mul(gate_up, out)

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
        view, kernels = self._batch_view(batch, kv.group), self._kernels
        kernels.rope_write(qkv, view, rope.cos, rope.sin, self._view(kv), out_q, q_norm, k_norm, norm_eps)

    def attention_input(
        self, x: F32, projection: AttentionProjection, batch: AttentionBatch, rope: RopeTable, kv: KVLayer, out_q: F32
    ) -> None:
        p, qkv = projection, projection.qkv
        assert isinstance(qkv, _native.Linear)
        view, table = self._view(kv), self._batch_view(batch, kv.group)
        self._kernels.attention_input(x, p.norm, p.eps, qkv, table, rope.cos, rope.sin, view, out_q, p.q_norm, p.k_norm)

    def norm_linear(self, x: F32, norm: F32, eps: float, weight: PackedLinear, out: F32) -> None:
        assert isinstance(weight, _native.Linear)
        self._kernels.norm_linear(x, norm, eps, weight, out)

    def gated_mlp(self, hidden: F32, norm: F32, eps: float, gate_up: PackedLinear, down: PackedLinear) -> None:
        assert isinstance(gate_up, _native.Linear)
        assert isinstance(down, _native.Linear)
        self._kernels.gated_mlp(hidden, norm, eps, gate_up, down)

    def paged_attention(self, q: F32, batch: AttentionBatch, kv: KVLayer, scale: float, out: F32) -> None:
        self._kernels.paged_attention(q, self._batch_view(batch, kv.group), self._view(kv), scale, out)

    def copy_blocks(self, pool: U8, block_bytes: int, sources: I32, targets: I32) -> None:
        self._kernels.copy_blocks(pool, block_bytes, sources, targets)

    def _batch_view(self, batch: AttentionBatch, group: int) -> _native.BatchView:
        """Checked once a step: the layers of a group have one view."""
        if self._batch is not batch:
            self._batch, self._batch_views = batch, {}
        found = self._batch_views.get(group)
        if found is None:
            table = batch.block_tables[group]
            found = self._batch_views[group] = _native.make_batch_view(batch.query_start, batch.start_position, table)
        return found

    def _view(self, kv: KVLayer) -> _native.KVView:
        key = (id(kv), kv.layer_offset)
        found = self._views.get(key)
        if found is None or found[0] is not kv:
            view = _native.make_kv_view(
                kv.pool, kv.block_bytes, kv.layer_offset, kv.block_size, kv.num_kv_heads, kv.head_dim, kv.kv_format
            )
            found = self._views[key] = (kv, view)
        return found[1]


def _start(num_threads: int, instruction_set: str, spin_pauses: int) -> _native.Kernels:
    try:
        return _native.Kernels(num_threads, instruction_set, spin_pauses)
    except RuntimeError as error:
        raise KernelError(
            f"{num_threads} threads cannot be started ({error}); lower --threads, or raise the machine's limit"
        ) from error
