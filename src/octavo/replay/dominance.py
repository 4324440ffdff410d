"""Counts, for many questions at once, how many earlier entries are at most a value: the core of reuse distances.

It knows neither caches nor traces. The structure is a wavelet matrix (Claude, Navarro, Ordonez: "The wavelet matrix",
Information Systems 47, 2015): the values' bits from the highest on, one stable partition for each, so a question costs
two look-ups a bit. All questions go through the levels together, as arrays.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def sums_below(values: I64, weights: I64 | None, ends: I64, limits: I64) -> I64:
    """For each question q: the sum of weights[j] over j < ends[q] with values[j] < limits[q]. weights None: counts.

    values: from 0 on. All arrays are one-dimensional; `ends` and `limits` have the same length.
    """
    total = np.zeros(len(ends), np.int64)
    if not len(values) or not len(ends):
        return total
    num_bits = max(int(values.max()), int(limits.max())).bit_length()
    start = np.zeros(len(ends), np.int64)  # the part of the level that each question looks at is [start, end)
    end = ends.astype(np.int64, copy=True)
    level, carried = values, weights
    for bit in range(num_bits - 1, -1, -1):
        is_zero = (level >> bit & 1) == 0
        zeros_before = np.zeros(len(level) + 1, np.int64)
        np.cumsum(is_zero, out=zeros_before[1:])
        zero_start, zero_end = zeros_before[start], zeros_before[end]
        goes_right = (limits >> bit & 1) == 1
        num_zeros = int(zeros_before[-1])
        order = np.concatenate((np.flatnonzero(is_zero), np.flatnonzero(~is_zero)))
        level = level[order]
        if carried is None:
            total += np.where(goes_right, zero_end - zero_start, 0)
        else:
            carried = carried[order]
            weight_before = np.zeros(len(level) + 1, np.int64)
            np.cumsum(carried, out=weight_before[1:])
            total += np.where(goes_right, weight_before[zero_end] - weight_before[zero_start], 0)
        start = np.where(goes_right, num_zeros + start - zero_start, zero_start)
        end = np.where(goes_right, num_zeros + end - zero_end, zero_end)
    return total
