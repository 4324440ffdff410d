"""What a cache of another size would have hit, as plain data: who estimates it tells it, a server shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CurveEstimate:
    scale: float  # times today's cache
    blocks: int
    hit_rate: float  # hit blocks / blocks that were looked up


@dataclass(frozen=True, slots=True)
class CacheCurve:
    """Since the start, older lookups counting less and less. Of whole blocks: hits inside a block are left out."""

    num_blocks: int
    block_size: int
    kv_bytes_per_block: int
    lookup_blocks: int
    hit_blocks: int  # really hit
    hit_rate: float  # really: `estimates` at scale 1 should say the same
    estimates: tuple[CurveEstimate, ...]
    sample: float  # share of the blocks that the estimates are from
    ghost_blocks: int  # blocks that are remembered


CurveSource = Callable[[], CacheCurve]
