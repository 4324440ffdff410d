"""Linear layers and embedding against plain arithmetic, and row by row bitwise, on every instruction set here."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from octavo.kernels.native import NativeOps, supported_instruction_sets
from octavo.kernels.reference import ReferenceOps
from octavo.kv_formats import bf16

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

INSTRUCTION_SETS = supported_instruction_sets()
DTYPES = ["f32", "bf16"]
ALL_DTYPES = ["f32", "bf16", "int8", "int4"]
ROW_COUNTS = [1, 2, 3, 7, 12, 13, 64, 100]
SHAPES = [(1, 1), (1, 575), (15, 3), (17, 3), (33, 575), (16, 1), (64, 64), (96, 1536), (576, 576), (200, 130)]


@cache
def ops_for(instruction_set: str, num_threads: int = 2) -> NativeOps:
    return NativeOps(num_threads, instruction_set)


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def same_bits(a: F32, b: F32) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def linear(ops: NativeOps, x: F32, weight: F32, dtype: str, bias: F32 | None = None) -> F32:
    out = np.full((len(x), len(weight)), np.nan, np.float32)
    ops.linear(x, ops.pack_linear(weight, bias, dtype), out)
    return out


def assert_close(out: F32, x: F32, weight: F32, added: F64 | float, *, dtype: str, instruction_set: str) -> None:
    """Against float64 on the rounded operands, within the bound of one rounding for each addition of the chain."""
    if dtype == "bf16":
        weight = bf16.round_trip(weight)
        x = bf16.round_trip(x) if instruction_set == "avx512_bf16" else x
    x64, w64 = x.astype(np.float64), weight.astype(np.float64).T
    bound = (np.abs(x64) @ np.abs(w64) + np.abs(added)) * 2.0**-24 * (2 * x.shape[1] + 4)
    assert (np.abs(out - (x64 @ w64 + added)) <= bound).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_linear_is_the_product(instruction_set: str, dtype: str, num_outputs: int, num_inputs: int) -> None:
    weight, bias = normal(1, num_outputs, num_inputs), normal(2, num_outputs)
    for rows in (1, 5, 30):
        x = normal(rows, rows, num_inputs)
        out = linear(ops_for(instruction_set), x, weight, dtype, bias)
        assert_close(out, x, weight, bias.astype(np.float64), dtype=dtype, instruction_set=instruction_set)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_linear_agrees_with_the_reference_operation(instruction_set: str) -> None:
    weight, bias, x, out = normal(1, 40, 96), normal(2, 40), normal(3, 9, 96), normal(4, 9, 40)
    expected = out.copy()
    ops, reference = ops_for(instruction_set), ReferenceOps()
    ops.linear(x, ops.pack_linear(weight, bias, "f32"), out, accumulate=True)
    reference.linear(x, reference.pack_linear(weight, bias, "f32"), expected, accumulate=True)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs", "rows"), [(33, 4097, 100), (40, 16384, 14), (48, 1100, 300)])
def test_long_rows_and_many_rows(
    instruction_set: str, dtype: str, num_outputs: int, num_inputs: int, rows: int
) -> None:
    """Sizes that are cut into chunks of inputs and blocks of rows; the cuts leave no trace."""
    weight, x = normal(1, num_outputs, num_inputs), normal(2, rows, num_inputs)
    ops = ops_for(instruction_set)
    out = linear(ops, x, weight, dtype)
    assert_close(out, x, weight, 0.0, dtype=dtype, instruction_set=instruction_set)
    for row in (0, rows // 2, rows - 1):
        assert same_bits(linear(ops, x[row : row + 1], weight, dtype), out[row : row + 1])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 3), (33, 575), (320, 256)])
def test_rows_do_not_depend_on_their_number_or_the_threads(
    instruction_set: str, dtype: str, num_outputs: int, num_inputs: int
) -> None:
    weight, bias, x = normal(1, num_outputs, num_inputs), normal(2, num_outputs), normal(3, 100, num_inputs)
    alone = ops_for(instruction_set, 1)
    packed = alone.pack_linear(weight, bias, dtype)
    expected = np.empty((100, num_outputs), np.float32)
    for row in range(100):
        alone.linear(x[row : row + 1], packed, expected[row : row + 1])
    for num_threads in (1, 2, 4):
        ops = ops_for(instruction_set, num_threads)
        for rows in ROW_COUNTS:
            for first in {0, 100 - rows}:
                out = np.full((rows, num_outputs), np.nan, np.float32)
                ops.linear(x[first : first + rows], packed, out)
                assert same_bits(out, expected[first : first + rows]), (num_threads, rows, first)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_every_row_count_gives_the_same_rows(instruction_set: str, dtype: str) -> None:
    weight, x = normal(1, 176, 640), normal(2, 2048, 640)
    ops = ops_for(instruction_set)
    packed = ops.pack_linear(weight, None, dtype)
    expected = np.empty((2048, 176), np.float32)
    ops.linear(x, packed, expected)
    for rows in [*range(1, 110), 191, 192, 193, 511, 1000]:
        out = np.empty((rows, 176), np.float32)
        ops.linear(x[:rows], packed, out)
        assert same_bits(out, expected[:rows]), rows


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_bias_and_accumulate_are_one_addition_each(instruction_set: str, dtype: str) -> None:
    weight, bias, x, before = normal(1, 37, 50), normal(2, 37), normal(3, 14, 50), normal(4, 14, 37)
    ops = ops_for(instruction_set)
    plain = linear(ops, x, weight, dtype)
    assert same_bits(linear(ops, x, weight, dtype, bias), plain + bias)
    out = before.copy()
    ops.linear(x, ops.pack_linear(weight, None, dtype), out, accumulate=True)
    assert same_bits(out, before + plain)
    out = before.copy()
    ops.linear(x, ops.pack_linear(weight, bias, dtype), out, accumulate=True)
    assert same_bits(out, before + (plain + bias))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_special_values_stay_in_their_row(instruction_set: str, dtype: str, special: float) -> None:
    weight, x = normal(1, 40, 33), normal(2, 30, 33)
    ops = ops_for(instruction_set)
    expected = linear(ops, x, weight, dtype)
    x[[0, 13, 29], [32, 5, 0]] = special
    out = linear(ops, x, weight, dtype)
    touched = np.isin(np.arange(30), [0, 13, 29])
    assert same_bits(out[~touched], expected[~touched])
    assert (np.isnan(out[touched]) if np.isnan(special) else np.isinf(out[touched])).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_memory_around_the_operands_is_neither_read_nor_written(instruction_set: str, dtype: str) -> None:
    """Operands at odd addresses, with NaN before and behind x and known values around out."""
    ops = ops_for(instruction_set)
    for rows, num_outputs, num_inputs in [(1, 1, 1), (3, 17, 3), (13, 33, 575)]:
        weight = normal(1, num_outputs, num_inputs)
        held_x = np.full(rows * num_inputs + 41, np.nan, np.float32)
        x = held_x[3 : 3 + rows * num_inputs].reshape(rows, num_inputs)
        x[...] = normal(2, rows, num_inputs)
        held_out = np.full(rows * num_outputs + 41, 7.0, np.float32)
        out = held_out[5 : 5 + rows * num_outputs].reshape(rows, num_outputs)
        ops.linear(x, ops.pack_linear(weight, None, dtype), out)
        assert same_bits(out, linear(ops, x.copy(), weight, dtype))
        assert (held_out[:5] == 7.0).all()
        assert (held_out[5 + rows * num_outputs :] == 7.0).all()


def test_widened_bf16_weights_are_f32_weights() -> None:
    """Where x is not rounded, bf16 weights give the bits that the same values give in f32."""
    weight, x = bf16.round_trip(normal(1, 50, 77)), normal(2, 20, 77)
    for instruction_set in INSTRUCTION_SETS:
        if instruction_set != "avx512_bf16":
            ops = ops_for(instruction_set)
            assert same_bits(linear(ops, x, weight, "bf16"), linear(ops, x, weight, "f32")), instruction_set


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (17, 3), (33, 575), (300, 64)])
def test_embedding_gives_the_stored_rows(instruction_set: str, dtype: str, num_outputs: int, num_inputs: int) -> None:
    weight = normal(1, num_outputs, num_inputs)
    weight.reshape(-1)[-1] = -0.0
    stored = bf16.round_trip(weight) if dtype == "bf16" else weight
    ops = ops_for(instruction_set)
    table = ops.pack_linear(weight, None, dtype)
    for rows in (1, 7, 70):
        token_ids = np.random.default_rng(rows).integers(0, num_outputs, rows, np.int32)
        token_ids[-1] = num_outputs - 1
        out = np.empty((rows, num_inputs), np.float32)
        ops.embedding(table, token_ids, out)
        assert same_bits(out, stored[token_ids])


def test_packing_rounds_as_the_format_does() -> None:
    """Ties, the largest numbers, denormals, infinities, NaN: the bits of kv_formats.bf16."""
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, np.uint64).astype(np.uint32)
    bits[:12] = [
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x7F800000,
        0xFF800000,
        0x7F800001,
        0xFFC00001,
        1,
        0x8000,
        0x18000,
        0x28000,
        0,
        1 << 31,
    ]
    weight = bits.view(np.float32).reshape(64, 64)
    ops = ops_for(INSTRUCTION_SETS[0])
    out = np.empty((64, 64), np.float32)
    ops.embedding(ops.pack_linear(weight, None, "bf16"), np.arange(64, dtype=np.int32), out)
    assert out.view(np.uint32).tolist() == bf16.round_trip(weight).view(np.uint32).tolist()


def test_wrong_shapes_are_refused() -> None:
    ops = ops_for(INSTRUCTION_SETS[0])
    packed = ops.pack_linear(normal(1, 8, 4), None, "f32")
    with pytest.raises(ValueError, match="num_inputs"):
        ops.linear(normal(2, 3, 5), packed, np.empty((3, 8), np.float32))
    with pytest.raises(ValueError, match="num_outputs"):
        ops.linear(normal(2, 3, 4), packed, np.empty((3, 9), np.float32))
    with pytest.raises(ValueError, match="vocabulary"):
        ops.embedding(packed, np.array([8], np.int32), np.empty((1, 4), np.float32))
    with pytest.raises(ValueError, match="bf17"):
        ops.pack_linear(normal(1, 8, 4), None, "bf17")
