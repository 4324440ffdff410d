"""YaRN: rope for contexts longer than trained (Peng et al. 2023, arXiv:2309.00071). It knows frequencies, no files.

Pairs that turn often within the trained context keep their frequency, those that hardly turn are slowed by the factor,
and a ramp blends between them; cos and sin are multiplied by a magnitude that grows with the factor.
"""

from __future__ import annotations

import math

import numpy as np

from octavo.kernels.ops import F32
from octavo.models.config import RopeConfig


def yarn_rope(
    theta: float,
    factor: float,
    original_max_positions: int,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    is_truncated: bool = True,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
) -> RopeConfig:
    """The magnitude is `attention_factor` where it is given; else it follows from the factor, and from the mscales."""
    if attention_factor is None:
        attention_factor = mscale_of(factor)
        if mscale and mscale_all_dim:
            attention_factor = mscale_of(factor, mscale) / mscale_of(factor, mscale_all_dim)
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_max_positions=original_max_positions,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        is_truncated=is_truncated,
        magnitude=attention_factor,
    )


def mscale_of(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_frequencies(rope: RopeConfig, frequencies: F32, rotary_dim: int) -> F32:
    """frequencies [rotary_dim / 2], unscaled."""
    low, high = (_pair_of(rope, turns, rotary_dim) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    pairs = np.arange(rotary_dim // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1).astype(np.float32)
    kept = np.float32(1) - ramp
    slowed = np.float32(1) / (np.float32(rope.factor) * (np.float32(1) / frequencies))
    blended: F32 = slowed * (np.float32(1) - kept) + frequencies * kept
    return blended


def _pair_of(rope: RopeConfig, turns: float, rotary_dim: int) -> float:
    """The pair, as a real number, that turns so often within the trained context."""
    return rotary_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
