"""What makes channels of keys alike in size, by the weights alone, without a text. It knows no caches and no formats.

Some models give a channel of k a weight ten times as large as the others', and that of q a small one. A cache with one
scale for a vector of keys then spends its steps on that channel.

`balanced_norms` changes no score: q times a power of two and k divided by it have the same products, exactly; and where
both numbers that rope turns together get the same one, it may be done before rope. `key_scales` is finer, and of one
KV head and one channel each: for formats that divide what they store.
"""

from __future__ import annotations

import numpy as np

from octavo.kernels.ops import F32, F64, AttentionProjection, Ops, RopeTable

_LEAST_SHARE = 0.01  # of the mean square: a channel whose weight is 0 still has a size
_LARGEST = 8  # of the exponents, so that no number leaves the range of its format
_NUM_INPUTS = 128  # that are made up: the root of the root of a mean of so many squares is right within 3%
_POSITIONS = 1024  # of a text, over which rope turns them
_STEPS = 16  # of a scale from one power of two to the next: so that the last bits of sums decide nothing


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


def key_scales(ops: Ops, projection: AttentionProjection, num_kv_heads: int, head_dim: int, rope: RopeTable) -> F32:
    """What K is to be divided by, and the queries multiplied, so that an error costs least: [num_kv_heads, head_dim].

    As `octavo calibrate` finds them, the root of (size of k / size of q) in each channel after rope, but on inputs that
    are made up: signs by chance in place of a normalised hidden state, always the same ones. So what is seen is what
    the norm before, the matrix and the norms of heads do to any input. rope: at least `positions` rows of the layer's.
    """
    num_inputs, num_outputs = projection.qkv.num_inputs, projection.qkv.num_outputs
    made = np.empty((_NUM_INPUTS, num_outputs), np.float32)
    ops.linear(_signs(num_inputs) * projection.norm, projection.qkv, made)
    heads = made.reshape(_NUM_INPUTS, -1, head_dim).astype(np.float64)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    with np.errstate(invalid="ignore", over="ignore"):
        q = _turned_squares(_normed(heads[:, :num_heads], projection.q_norm), rope)
        k = _turned_squares(_normed(heads[:, num_heads : num_heads + num_kv_heads], projection.k_norm), rope)
        q = q.reshape(num_kv_heads, -1, head_dim).mean(axis=1)
        powers = (np.log2(_with_least(k)) - np.log2(_with_least(q))) / 4  # of squares
        powers -= powers.mean(axis=1, keepdims=True)
    if not np.isfinite(powers).all():
        return np.ones((num_kv_heads, head_dim), np.float32)
    return np.exp2(np.rint(powers * _STEPS).clip(-_LARGEST * _STEPS, _LARGEST * _STEPS) / _STEPS).astype(np.float32)


def positions(longest: int) -> int:
    """How many rows of a rope's table `key_scales` wants of a model with so long a context."""
    return min(_POSITIONS, longest)


def _signs(num_inputs: int) -> F32:
    """[_NUM_INPUTS, num_inputs]: +1 and -1, by a stream of bits that numpy promises never to change."""
    words = np.random.PCG64(0).random_raw(-(-_NUM_INPUTS * num_inputs // 64)).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8))[: _NUM_INPUTS * num_inputs]
    return (2 * bits.astype(np.float32) - 1).reshape(_NUM_INPUTS, num_inputs)


def _normed(heads: F64, norm: F32 | None) -> F64:
    """heads [rows, num_heads, head_dim], as the RMS norm of heads leaves them."""
    if norm is None:
        return heads
    squares = np.square(heads).mean(axis=-1, keepdims=True)
    return np.asarray(heads / np.sqrt(np.where(squares > 0, squares, 1.0)) * norm)


def _turned_squares(heads: F64, rope: RopeTable) -> F64:
    """heads [rows, num_heads, head_dim] -> [num_heads, head_dim]: the mean square of each number at every position."""
    half = rope.cos.shape[1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    cos, sin = (table[:_POSITIONS].astype(np.float64) for table in (rope.cos, rope.sin))
    cos_squares, sin_squares, products = ((a * b).mean(axis=0) for a, b in ((cos, cos), (sin, sin), (cos, sin)))
    found = np.square(heads).mean(axis=0)
    of_first, of_second, of_both = (
        found[:, :half].copy(),
        found[:, half : 2 * half].copy(),
        (first * second).mean(axis=0),
    )
    found[:, :half] = cos_squares * of_first + sin_squares * of_second - 2 * products * of_both
    found[:, half : 2 * half] = sin_squares * of_first + cos_squares * of_second + 2 * products * of_both
    return np.asarray(found)


def _with_least(squares: F64) -> F64:
    """squares [num_heads, head_dim]; of a head that is all 0 every channel is alike."""
    means = squares.mean(axis=1, keepdims=True)
    return np.asarray(squares + _LEAST_SHARE * np.where(means > 0, means, 1.0))


def _pair_squares(norm: F32) -> F64:
    """[head_dim / 2]: the mean square of the two numbers of each pair."""
    squares = np.square(norm, dtype=np.float64)
    pairs = squares.reshape(2, -1).mean(axis=0)
    return np.asarray(pairs + _LEAST_SHARE * squares.mean())
