"""Packed weights lie in chunks that matrices have in common: none is changed by what comes and goes beside it."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32, PackedLinear
from octavo.kernels.reference import ReferenceOps

CHUNK_BYTES = 64 << 20


def normal(*shape: int, seed: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def bits(ops: NativeOps, weight: PackedLinear) -> bytes:
    out = np.empty((3, weight.num_outputs), np.float32)
    ops.linear(normal(3, weight.num_inputs, seed=0), weight, out)
    return out.tobytes()


def alone(index: int, weights_dtype: str) -> bytes:
    ops = NativeOps(1)
    return bits(ops, packed(ops, index, weights_dtype))


def packed(ops: NativeOps, index: int, weights_dtype: str) -> PackedLinear:
    """Matrices of many sizes, none a multiple of a line."""
    return ops.pack_linear(normal(17 + 13 * index, 31 + 32 * (index % 5), seed=index), None, weights_dtype)


@pytest.mark.parametrize("weights_dtype", ["f32", "bf16", "int8", "int4"])
def test_matrices_keep_their_bits_whatever_comes_and_goes(weights_dtype: str) -> None:
    ops = NativeOps(1)
    held = {index: packed(ops, index, weights_dtype) for index in range(20)}
    for index in range(0, 20, 2):
        del held[index]
    gc.collect()
    held |= {index: packed(ops, index, weights_dtype) for index in range(20, 30)}
    for index, weight in held.items():
        assert bits(ops, weight) == alone(index, weights_dtype)


def test_a_matrix_outlives_the_operations_that_packed_it() -> None:
    first = packed(NativeOps(1), 7, "int8")
    gc.collect()
    assert bits(NativeOps(1), first) == alone(7, "int8")


def test_a_matrix_may_be_larger_than_a_chunk() -> None:
    ops, reference = NativeOps(1), ReferenceOps()
    before = packed(ops, 3, "f32")
    weight = normal(16_500, 1024, seed=1)
    large = ops.pack_linear(weight, None, "f32")
    after = packed(ops, 4, "f32")
    assert large.num_bytes > CHUNK_BYTES
    x, out, expected = normal(1, 1024, seed=2), np.empty((1, 16_500), np.float32), np.empty((1, 16_500), np.float32)
    ops.linear(x, large, out)
    reference.linear(x, reference.pack_linear(weight, None, "f32"), expected)
    np.testing.assert_allclose(out, expected, atol=1e-3)
    assert bits(ops, before) == alone(3, "f32")
    assert bits(ops, after) == alone(4, "f32")
