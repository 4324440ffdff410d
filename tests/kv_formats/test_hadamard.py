"""The turn of heads: the matrix that it says it is, its own inverse, block by block, in the order that it says."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kv_formats.hadamard import turn


def matrix(size: int) -> np.ndarray:
    found = np.ones((1, 1))
    while len(found) < size:
        found = np.block([[found, found], [found, -found]])
    return found / np.sqrt(size)


@pytest.mark.parametrize(("head_dim", "block"), [(16, 16), (48, 16), (64, 64), (80, 16), (96, 32), (256, 256)])
def test_it_is_the_matrix_of_walsh_and_hadamard_in_blocks(head_dim: int, block: int) -> None:
    x = np.random.default_rng(0).standard_normal((3, 5, head_dim), np.float32)
    expected = x.reshape(3, 5, -1, block).astype(np.float64) @ matrix(block)
    np.testing.assert_allclose(turn(x), expected.reshape(x.shape), atol=3e-6)
    np.testing.assert_allclose(turn(turn(x)), x, atol=3e-6)


def test_products_stay_and_what_is_large_in_one_channel_is_spread() -> None:
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 7, 128), np.float32)
    k[:, 3] += 40
    np.testing.assert_allclose((turn(q) * turn(k)).sum(axis=1), (q * k).sum(axis=1), rtol=1e-4, atol=1e-4)
    assert np.abs(turn(k)).max() < np.abs(k).max() / 4


def test_the_order_of_the_sums_is_the_one_that_kernels_follow() -> None:
    x = np.exp(4 * np.random.default_rng(2).standard_normal((2, 64))).astype(np.float32)
    expected = x.copy()
    for step in (1, 2, 4, 8, 16, 32):
        for first in [i for i in range(64) if not i & step]:
            a, b = expected[:, first].copy(), expected[:, first + step].copy()
            expected[:, first], expected[:, first + step] = a + b, a - b
    assert np.array_equal(turn(x), expected * np.float32(1 / 8))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_takes_its_vector_with_it(value: float) -> None:
    x = np.ones((2, 32), np.float32)
    x[1, 5] = value
    assert np.isfinite(turn(x)[0]).all()
    assert not np.isfinite(turn(x)[1]).any()
