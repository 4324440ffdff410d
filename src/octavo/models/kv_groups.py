"""Layers into KV groups: by what they read, and so that a block of every group has the same bytes. No arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo.core.kv_spec import KVGroupSpec


def group_by_window(
    windows: Sequence[int | None], num_kv_heads: int, head_dim: int, kv_format: str
) -> tuple[KVGroupSpec, ...]:
    """Layers of one geometry, by window. Where there are several windows, a group has as many layers as divide all."""
    layers: dict[int | None, list[int]] = {}
    for index, window in enumerate(windows):
        layers.setdefault(window, []).append(index)
    size = math.gcd(*(len(one) for one in layers.values()))
    found = []
    for window in sorted(layers, key=lambda one: (one is not None, one or 0)):  # full layers first
        kind = "full" if window is None else f"window{window}"
        parts = [layers[window][start : start + size] for start in range(0, len(layers[window]), size)]
        for number, part in enumerate(parts):
            name = kind if len(parts) == 1 else f"{kind}.{number}"
            found.append(KVGroupSpec(name, tuple(part), num_kv_heads, head_dim, kv_format, window=window))
    return tuple(found)
