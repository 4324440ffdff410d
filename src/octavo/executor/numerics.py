"""A fingerprint of what the kernels give: what was measured with the same one holds for these kernels too.

A small layer is run on fixed numbers, and every bit of what comes out is hashed. So another instruction set that rounds
otherwise, or a kernel that was changed, has another fingerprint, without a version that somebody must remember to
raise. Threads and neighbours in a batch make no difference (law 1). It does not know what is measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256

import numpy as np

from octavo.core.kv_groups import LayerGeometry, build_groups
from octavo.core.kv_spec import KVSpec
from octavo.executor.config import WEIGHED_FORMAT
from octavo.executor.kv_storage import KVStorage
from octavo.kernels.ops import F32, AttentionBatch, AttentionProjection, Ops, RopeTable
from octavo.models.balance import key_scales

_HIDDEN, _DIM, _HEADS, _KV_HEADS, _WIDE = 64, 64, 2, 1, 96
_CHUNKS = (277, 1)  # tokens: a prefill, which ends inside a tile of its second span, and a step of decoding
_BLOCKS = -(-sum(_CHUNKS) // 16)


def numerics(ops: Ops, weights_dtype: str, kv_formats: Iterable[str]) -> str:
    """SHA-256 in hex of what a layer with weights of this dtype gives over a cache in each of the formats."""
    found = sha256(weights_dtype.encode())
    for kv_format in sorted(set(kv_formats)):
        found.update(kv_format.encode())
        for has_scales in (False, True) if kv_format == WEIGHED_FORMAT else (False,):
            for part in _layer(ops, weights_dtype, kv_format, has_scales):
                found.update(part.tobytes())
    return found.hexdigest()


def _numbers(seed: int, *shape: int) -> F32:
    """Between -1 and 1, the same everywhere: an integer hash, no generator of a library."""
    count = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) + np.uint64(seed << 32)
    mixed = (count * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)  # 24 bits: exact in f32
    return (mixed.astype(np.float32) / np.float32(2**23) - np.float32(1)).reshape(shape)


def _layer(ops: Ops, weights_dtype: str, kv_format: str, has_scales: bool) -> list[F32]:
    """has_scales: of channels, as the weights of models with norms of heads tell them."""
    groups = build_groups([LayerGeometry(_KV_HEADS, _DIM, kv_format)])
    storage = KVStorage(KVSpec(groups, 16), _BLOCKS * len(groups))
    (kv,) = storage.layers
    tables = np.arange(_BLOCKS * len(groups), dtype=np.int32).reshape(len(groups), 1, _BLOCKS)
    angles = _numbers(1, 16 * _BLOCKS, _DIM // 2)
    rope = RopeTable(angles, np.sqrt(1 - angles * angles))
    qkv = ops.pack_linear(_numbers(2, (_HEADS + 2 * _KV_HEADS) * _DIM, _HIDDEN), None, weights_dtype)
    output = ops.pack_linear(_numbers(3, _HIDDEN, _HEADS * _DIM), None, weights_dtype)
    gate_up = ops.pack_linear(_numbers(4, 2 * _WIDE, _HIDDEN), None, weights_dtype)
    down = ops.pack_linear(_numbers(5, _HIDDEN, _WIDE), None, weights_dtype)
    norm = _numbers(6, _HIDDEN) + 2
    projection = AttentionProjection(norm, 1e-5, qkv)
    if has_scales:
        scales = key_scales(ops, projection, _KV_HEADS, _DIM, rope)
        kv = replace(kv, k_scales=scales, v_scales=np.ones_like(scales))
    found, start = [], 0
    for count in _CHUNKS:
        hidden = _numbers(7 + start, count, _HIDDEN)
        batch = AttentionBatch(np.array([0, count], np.int32), np.array([start], np.int32), tables)
        q, attended = (np.empty((count, _HEADS, _DIM), np.float32) for _ in range(2))
        ops.attention_input(hidden, projection, batch, rope, kv, q)
        ops.paged_attention(q, batch, kv, _DIM**-0.5, attended)
        ops.linear(attended.reshape(count, -1), output, hidden, accumulate=True)
        ops.gated_mlp(hidden, norm, 1e-5, gate_up, down)
        found += [attended, hidden]
        start += count
    return found
