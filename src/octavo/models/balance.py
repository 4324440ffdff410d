"""Norms of q and k heads that make channels of keys alike, and change no score. It knows no caches and no formats.

Some models give a channel of k a weight ten times as large as the others', and that of q a small one. A cache with one
scale for a vector of keys then spends its steps on that channel. q times a power of two and k divided by it have the
same products, exactly; and where both numbers that rope turns together get the same one, it may be done before rope.
"""

from __future__ import annotations

import numpy as np

from octavo.kernels.ops import F32

_LEAST_SHARE = 0.01  # of the mean square: a channel whose weight is 0 still has a size
_LARGEST = 8  # of the exponents, so that no number leaves the range of its format


def balanced_norms(q_norm: F32 | None, k_norm: F32 | None) -> tuple[F32 | None, F32 | None]:
    """Weights of the RMS norms of q and k heads, each [head_dim], as they are to be used.

    An error of the same size in every channel of k costs least where q and k have the same size in each of them (as
    `octavo calibrate` does by a text): so the factor of a channel is the root of (size of k / size of q), here by the
    weights alone, as a power of two. Numbers j and j + head_dim / 2 are those that rope turns together.
    """
    if q_norm is None or k_norm is None or not (np.isfinite(q_norm).all() and np.isfinite(k_norm).all()):
        return q_norm, k_norm
    if not (q_norm.any() and k_norm.any()):
        return q_norm, k_norm
    ratio = np.log2(_pair_squares(k_norm)) - np.log2(_pair_squares(q_norm))  # of squares: a quarter of it is wanted
    powers = np.rint((ratio - ratio.mean()) / 4).clip(-_LARGEST, _LARGEST).astype(np.int32)
    powers = np.concatenate([powers, powers])
    return np.ldexp(q_norm, powers), np.ldexp(k_norm, -powers)


def _pair_squares(norm: F32) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """[head_dim / 2]: the mean square of the two numbers of each pair."""
    squares = np.square(norm, dtype=np.float64)
    pairs = squares.reshape(2, -1).mean(axis=0)
    return np.asarray(pairs + _LEAST_SHARE * squares.mean())
