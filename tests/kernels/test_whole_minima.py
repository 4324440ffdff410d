"""Minima of 4-bit weights as whole numbers: which matrices have them, and products with them on every instruction set.

Rows alone and together, and products against their meaning in numpy: in test_grouped_linear.py, for such matrices too.
"""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32, U8
from octavo.kernels.weight_groups import (
    MOST_WHOLE_GROUPS,
    is_fine,
    most_code,
    multiply,
    read_blocks,
    round_factors,
    round_inputs,
    whole_minima,
)
from tests.kernels.test_linear import INSTRUCTION_SETS, normal, ops_for, same_bits


def blocks_with(minima: F32, seed: int = 1) -> U8:
    """minima [outputs, groups], of f16; codes and scales at random. Rows of q4_1 blocks."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*minima.shape, 20), np.uint8)
    scales = (rng.standard_normal(minima.shape) * 0.01).astype(np.float16)
    blocks[..., :2] = scales[..., np.newaxis].view(np.uint8)
    with np.errstate(over="ignore"):
        blocks[..., 2:4] = minima.astype(np.float16)[..., np.newaxis].view(np.uint8)
    return blocks.reshape(len(minima), -1)


def are_whole(*minima: float) -> bool:
    """Of an output among others with such minima."""
    rows = np.zeros((20, len(minima)), np.float32)
    rows[3] = minima
    return whole_minima(read_blocks(blocks_with(rows), "q4_1")) is not None


def product(ops: NativeOps, x: F32, blocks: U8) -> F32:
    out = np.full((len(x), len(blocks)), np.nan, np.float32)
    ops.linear(x, ops.pack_blocks(blocks, None, "q4_1"), out)
    return out


def test_which_minima_are_whole() -> None:
    assert are_whole(0, 0)
    assert are_whole(-1, 32736)
    assert are_whole(-0.0, 1.5 * 2.0**-24)  # a denormal of one bit less is 2^-24
    assert are_whole(2047 * 2.0**-14, -2047 * 2.0**-10)  # 11 bits, four powers of 2 apart: 15
    assert not are_whole(2047 * 2.0**-14, -2047 * 2.0**-9)
    assert not are_whole(1, 32768)
    assert are_whole(2, 32768)
    assert not are_whole(1, 2, 3)
    assert not are_whole(1, np.inf)
    assert not are_whole(np.nan, 1)


def test_units_are_the_largest_that_lose_nothing() -> None:
    minima = np.array([[6, -12, 0, 20], [0, 0, 0, 0], [2.0**-24, 0, 3 * 2.0**-24, 0]], np.float32)
    found = whole_minima(read_blocks(blocks_with(minima), "q4_1"))
    assert found is not None
    whole, units = found
    assert units.tolist() == [2, 2.0**16, 2.0**-24]
    assert (whole * units[:, np.newaxis] == minima).all()
    most = np.ones((1, MOST_WHOLE_GROUPS), np.float32)
    assert whole_minima(read_blocks(blocks_with(most), "q4_1")) is not None
    more = np.ones((1, MOST_WHOLE_GROUPS + 2), np.float32)
    assert whole_minima(read_blocks(blocks_with(more), "q4_1")) is None


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("groups", [2, 18, 48])
@pytest.mark.parametrize("bits", [1, 8, 11])
def test_products_are_those_of_numpy(instruction_set: str, groups: int, bits: int) -> None:
    """Bit for bit where additions are fused, but for what double precision rounds otherwise: next to nothing."""
    limit = 2**bits - 1
    minima = np.random.default_rng(bits).integers(-limit, limit + 1, (40, groups)).astype(np.float32) * np.float32(
        2.0**-9
    )
    blocks, x = blocks_with(minima), normal(4, 44, 32 * groups)
    x[:, :32] *= np.float32(40)
    assert whole_minima(read_blocks(blocks, "q4_1")) is not None
    out, expected = product(ops_for(instruction_set, 1), x, blocks), multiply(x, read_blocks(blocks, "q4_1"))
    if instruction_set.startswith("avx"):
        assert (out == expected).mean() > 0.999
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_minima_that_are_not_whole_are_added_group_by_group(instruction_set: str) -> None:
    minima = np.random.default_rng(1).standard_normal((40, 18)).astype(np.float32)
    minima[7, 3] = 2.0**-24
    blocks, x = blocks_with(minima), normal(4, 44, 576)
    groups = read_blocks(blocks, "q4_1")
    assert whole_minima(groups) is None
    out = product(ops_for(instruction_set, 1), x, blocks)
    np.testing.assert_allclose(out, multiply(x, groups), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize(
    ("groups", "most"), [(2, 32736), (4, -32736), (48, 32736), (64, -32736), (MOST_WHOLE_GROUPS, 2046)]
)
def test_the_largest_sums_do_not_overflow(instruction_set: str, groups: int, most: int) -> None:
    """Minima of as many bits as they may have, and factors as large as they may be, of one group or of all."""
    minima = np.full((17, groups), most, np.float32)
    minima[:, 1] = 1  # which makes the unit 1
    blocks = blocks_with(minima).reshape(17, groups, 20)
    blocks[..., :2] = 0  # scales
    blocks = blocks.reshape(17, -1)
    found = whole_minima(read_blocks(blocks, "q4_1"))
    assert found is not None
    assert np.abs(found[0]).max() == abs(most)
    most = most_code(4)
    x = np.full((8, 32 * groups), most, np.float32)
    x[1::2] *= -1
    x[2, 32:] = 0
    x[3, 32:] = 0
    x[3, :32] = -most
    exact = x.astype(np.float64).reshape(8, groups, 32).sum(axis=-1) @ minima.astype(np.float64).T
    out = product(ops_for(instruction_set), x, blocks)
    np.testing.assert_allclose(out, exact, rtol=groups * 2.0**-14)
    np.testing.assert_allclose(out, multiply(x, read_blocks(blocks, "q4_1")), rtol=1e-6)


def test_how_many_bits_leave_enough_for_factors() -> None:
    for groups, bits in [(2, 15), (64, 15), (128, 14), (256, 13), (1024, 11)]:
        minima = np.ones((3, groups), np.float32)
        minima[1, 0] = 2.0 ** (bits - 1)
        assert whole_minima(read_blocks(blocks_with(minima), "q4_1")) is not None
        minima[1, 0] *= 2
        assert whole_minima(read_blocks(blocks_with(minima), "q4_1")) is None


@pytest.mark.parametrize("groups", [18, 48, 128, 448])
@pytest.mark.parametrize("large", [1.0, 100.0, 3000.0, 1e5])
def test_minima_lose_less_than_rounding_activations(groups: int, large: float) -> None:
    """Also beside one large number, which is alone in a finely rounded group."""
    rng = np.random.default_rng(groups)
    minima = rng.integers(-255, 256, (40, groups)).astype(np.float32) * np.float32(2.0**-11)
    weight = read_blocks(blocks_with(minima), "q4_1")
    assert whole_minima(weight) is not None
    x = normal(5, 60, 32 * groups)
    x[:, 40] *= np.float32(large)
    values, rounded = weight.values().astype(np.float64).T, round_inputs(x, 4).values().astype(np.float64)
    by_minima = multiply(x, weight) - rounded @ values
    by_rounding = (rounded - x) @ values
    assert np.sqrt((by_minima**2).mean()) < 0.25 * np.sqrt((by_rounding**2).mean())


@pytest.mark.parametrize("bits", [0, 9, 13, 15])
@pytest.mark.parametrize("size", [1.0, 2.0**-60, 2.0**60, 2.0**-110])
def test_factors_lose_little(size: float, bits: int) -> None:
    """At most half a unit each, which is the least that 16 bits, or sums of 31 bits, allow."""
    x = normal(6, 200, 1536) * np.float32(size)
    x[::3, :32] *= np.float32(1000)
    x[1::50, 32:] = 0
    x[2::50] = 0
    rounded = round_inputs(x, 4)
    exact = np.where(is_fine(rounded), np.float32(0), rounded.scale * rounded.codes.sum(axis=-1).astype(np.float32))
    whole, units = round_factors(rounded, bits)
    assert np.abs(whole).max() <= 32768
    assert (np.abs(whole).sum(axis=1, dtype=np.int64) * 2**bits < 2**31).all()
    assert (np.frexp(units)[0] == 0.5).all()
    half = np.where(whole == 32767, 1, 0.5) * units[:, np.newaxis]
    assert (np.abs(whole * units[:, np.newaxis].astype(np.float64) - exact) <= half).all()
    sums, largest = np.abs(exact).sum(axis=1), np.abs(exact).max(axis=1)
    least = np.maximum(sums * 2.0 ** (bits - 29), largest * 2.0**-14) * 1.0001
    assert (units[sums > 0] <= least[sums > 0]).all()
    assert (whole[sums == 0] == 0).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("rows", [20, 44])  # the second in tiles enough for crossed products, on one thread
def test_rows_of_zeros_tiny_and_not_finite_numbers(instruction_set: str, rows: int) -> None:
    minima = np.random.default_rng(2).integers(-255, 256, (33, 6)).astype(np.float32) * np.float32(2.0**-9)
    blocks, x = blocks_with(minima), normal(3, rows, 192)
    x[4] = 0
    x[5] *= np.float32(2.0**-110)
    x[6] = 1e-44
    x[7, 100] = np.inf
    x[8] *= np.float32(1e36)
    x[9] = 2e36  # whose sum is more than f32 holds
    ops = ops_for(instruction_set, 1)
    out = product(ops, x, blocks)
    assert (out[[4, 6]] == 0).all()
    assert np.isnan(out[7]).all()
    assert np.isfinite(np.delete(out, 7, axis=0)).all()
    expected = multiply(x, read_blocks(blocks, "q4_1"))
    for row in (5, 8, 9):
        np.testing.assert_allclose(out[row], expected[row], rtol=1e-3, atol=np.abs(expected[row]).max() * 1e-5)
    alone = np.concatenate([product(ops, x[row : row + 1], blocks) for row in range(rows)])
    assert same_bits(np.delete(out, 7, axis=0), np.delete(alone, 7, axis=0))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("rows", [1, 5, 7, 40, 200])
def test_a_gated_mlp_is_its_parts(instruction_set: str, rows: int) -> None:
    """Where gate and up lie beside each other in a tile, each has its own units."""
    width, inner = 64, 96
    rng = np.random.default_rng(rows)
    factors = np.float32(2.0) ** rng.integers(-12, -5, (2 * inner, 1)).astype(np.float32)  # the units of outputs differ
    gate_up = blocks_with(rng.integers(-255, 256, (2 * inner, 2)).astype(np.float32) * factors)
    down = blocks_with(rng.integers(-31, 32, (width, 4)).astype(np.float32) * np.float32(2.0**-9))[
        :, : 20 * inner // 32
    ]
    ops, hidden, norm = ops_for(instruction_set), normal(1, rows, width), np.ones(width, np.float32)
    packed = ops.pack_blocks(gate_up, None, "q4_1"), ops.pack_blocks(np.ascontiguousarray(down), None, "q4_1")
    fused, apart = hidden.copy(), hidden.copy()
    ops.gated_mlp(fused, norm, 1e-5, *packed)
    both, activated = np.empty((rows, 2 * inner), np.float32), np.empty((rows, inner), np.float32)
    ops.norm_linear(hidden, norm, 1e-5, packed[0], both)
    ops.silu_mul(both, activated)
    ops.linear(activated, packed[1], apart, accumulate=True)
    assert same_bits(fused, apart)
    assert not same_bits(fused, hidden)
