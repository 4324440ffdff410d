"""In numpy, what attention over K and V in codes means on processors that multiply bytes and add them up in 32 bits.

A query is rounded to 8 bits with one scale (to 16 where channels of K have scales: there its error would be the larger
one); a score is a sum of products of codes, exact, times two scales. Of each 32 keys at a multiple of 32, the weights
times the scales of V are rounded to 8 bits in a unit of their own, a power of two that the largest of them gives: so
keys of little weight keep their bits beside one of much. Spans of 256 keys are summed from scratch and merged, as
everywhere. Of V in 4 bits, codes count from the middle, code 8, and what that stands for is added apart. So is `int8`
computed, `k8v4`, and the values of `int4`, whose scores are those of bf16. Processors without such products widen K and
V to f32 (`reference.py`). It knows no layout of the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int8]
I32 = npt.NDArray[np.int32]

SPAN_KEYS, UNIT_KEYS = 256, 32
QUERY_8, QUERY_16 = 127, 127 * 256  # the largest codes of a query
FAR_SCORE = 1024  # from there on, differences from the largest score are what is added to
LEAST_EXPONENT = -110  # units of weights stay normal numbers
_EXP2 = (0.0551716649, 0.242611122, 0.693260986, 1.0)  # 2^f, |f| <= 1/2: relative error 7.5e-5


@dataclass(frozen=True, slots=True)
class Codes:
    """K or V of tokens from position 0 on: scale * code + middle, where there are middles."""

    codes: I8  # [n, head_dim]
    scales: F32  # [n]
    middles: F32 | None = None  # [n]

    def __getitem__(self, tokens: slice) -> Codes:
        middles = None if self.middles is None else self.middles[tokens]
        return Codes(self.codes[tokens], self.scales[tokens], middles)


def round_query(q: F32, largest: int = QUERY_8) -> tuple[I32, np.float32]:
    """q [head_dim] -> codes within -largest to largest, and what they are to be multiplied by."""
    most = np.abs(q).max()
    if not np.isfinite(most):
        return np.zeros(q.shape, np.int32), np.float32(np.nan)
    if most < np.float32(1e-30):
        return np.zeros(q.shape, np.int32), np.float32(0)
    return np.rint(q * (np.float32(largest) / most)).astype(np.int32), most / np.float32(largest)


def attend(q: F32, k: Codes, v: Codes, first: int = 0, largest: int = QUERY_8) -> F64:
    """What one row of one head gets of keys `first` to n - 1: [head_dim].

    q: times what scores are multiplied by, and log2(e).
    """
    codes, factor = round_query(q, largest)
    scores = (k.codes.astype(np.int32) @ codes).astype(np.float32) * (k.scales * factor)
    scores[:first] = -np.inf
    most, total, values = np.float32(-np.inf), 0.0, np.zeros(len(q))
    for start in range(first // SPAN_KEYS * SPAN_KEYS, len(scores), SPAN_KEYS):
        span = slice(start, start + SPAN_KEYS)
        m, part, added = _span(scores[span], v[span])
        larger = max(most, m)
        old, new = 2.0 ** float(most - larger), 2.0 ** float(m - larger)
        most, total, values = larger, total * old + part * new, values * old + added * new
    return values / total


def _span(scores: F32, v: Codes) -> tuple[np.float32, float, F64]:
    """The largest score, the sum of the weights, and weights x V."""
    most, total, values = scores.max(), 0.0, np.zeros(v.codes.shape[1])
    is_far = abs(most) >= FAR_SCORE
    scores, base = (scores - most, np.float32(0)) if is_far else (scores, most)
    bits = np.ascontiguousarray(v.scales, np.float32).view(np.int32).astype(np.float32)
    logs = (bits * 2.0**-23 + np.float64(np.float32(0.1 - 127))).astype(np.float32)  # at least log2, at most 0.1 more
    for start in range(0, len(scores), UNIT_KEYS):
        keys = slice(start, start + UNIT_KEYS)
        shift = np.float32(max(np.ceil((scores[keys] + logs[keys]).max() - base), LEAST_EXPONENT) - 8)
        weights = _exp2(scores[keys] - (base + shift))
        unit = 2.0 ** float(shift)
        total += float(weights.sum(dtype=np.float64)) * unit
        values += (np.rint(weights * v.scales[keys]) @ v.codes[keys].astype(np.float64)) * unit
        if v.middles is not None:
            values += float(weights.astype(np.float64) @ v.middles[keys]) * unit
    return most, total, values


def _exp2(x: F32) -> F32:
    """Each multiplication with its addition rounded once, as the kernels do."""
    x = np.maximum(x, np.float32(-200))
    whole = np.rint(x)
    part = (x - whole).astype(np.float64)
    power: F32 = np.full(x.shape, _EXP2[0], np.float32)
    for term in _EXP2[1:]:
        power = (power * part + np.float64(np.float32(term))).astype(np.float32)
    return np.ldexp(power, whole.astype(np.int32))
