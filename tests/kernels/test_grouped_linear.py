"""Linear layers with int8 and 4-bit weights against their meaning in numpy, on every instruction set here.

That rows do not depend on their number or the threads is in test_linear.py, for these weights too.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32, U8, PackedLinear
from octavo.kernels.reference import ReferenceLinear, ReferenceOps
from octavo.kernels.weight_groups import BLOCK_BYTES, Groups, multiply, read_blocks, round_groups
from tests.kernels.test_linear import INSTRUCTION_SETS, normal, ops_for, same_bits

KINDS = list(BLOCK_BYTES)
FORMS = ["int8", "int4", *KINDS]  # all ways in which a matrix comes to be packed
SHAPES = [(1, 1), (17, 3), (16, 31), (33, 33), (15, 64), (48, 575), (96, 1536), (200, 130)]
BLOCK_SHAPES = [(1, 32), (17, 64), (33, 576), (96, 1536)]


def random_blocks(seed: int, num_outputs: int, num_inputs: int, kind: str) -> U8:
    """Any codes, with scales and minima of the size that weights have."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_outputs, num_inputs // 32, BLOCK_BYTES[kind]), np.uint8)
    scales = rng.standard_normal((num_outputs, num_inputs // 32, 2)).astype(np.float16) * np.float16(0.01)
    blocks[..., :2] = np.ascontiguousarray(scales[..., :1]).view(np.uint8)
    if kind == "q4_1":
        blocks[..., 2:4] = np.ascontiguousarray(scales[..., 1:]).view(np.uint8)
    return blocks.reshape(num_outputs, -1)


def pack(ops: NativeOps | ReferenceOps, form: str, num_outputs: int, num_inputs: int, seed: int = 1) -> PackedLinear:
    if form in KINDS:
        return ops.pack_blocks(random_blocks(seed, num_outputs, num_inputs, form), None, form)
    return ops.pack_linear(normal(seed, num_outputs, num_inputs), None, form)


def product(ops: NativeOps | ReferenceOps, x: F32, packed: PackedLinear) -> F32:
    out = np.full((len(x), packed.num_outputs), np.nan, np.float32)
    ops.linear(x, packed, out)
    return out


def sum_of_magnitudes(x: F32, weight: Groups) -> F32:
    """What bounds the rounding of the additions."""
    parts = Groups(np.abs(weight.codes), np.abs(weight.scale), None, weight.size)
    total = multiply(np.abs(x), parts)
    if weight.minimum is not None:
        ones = Groups(np.ones_like(weight.codes), np.abs(weight.minimum), None, weight.size)
        total += multiply(np.abs(x), ones)
    return total


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize(
    ("form", "num_outputs", "num_inputs"),
    [(form, *shape) for form in FORMS for shape in (BLOCK_SHAPES if form in KINDS else SHAPES)],
)
def test_product_is_the_one_of_the_groups(instruction_set: str, form: str, num_outputs: int, num_inputs: int) -> None:
    ops, reference = ops_for(instruction_set), ReferenceOps()
    packed, meant = (pack(each, form, num_outputs, num_inputs) for each in (ops, reference))
    assert isinstance(meant, ReferenceLinear)
    assert meant.groups is not None
    for rows in (1, 2, 5, 13, 30):
        x = normal(rows, rows, num_inputs)
        bound = sum_of_magnitudes(x, meant.groups) * 2.0**-23 * (2 * meant.groups.codes.shape[1] + 2)
        assert (np.abs(product(ops, x, packed) - product(reference, x, meant)) <= bound).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extreme", ["lowest", "highest", "random"])
def test_integer_sums_are_exact(instruction_set: str, kind: str, extreme: str) -> None:
    """Scales of 1 and all codes, at their limits too: every sum is an integer below 2^24, so no bit may differ."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (40, 3, BLOCK_BYTES[kind]), np.uint8)
    if extreme != "random":
        codes = {"lowest": {"q8_0": 0x80}, "highest": {"q8_0": 0x7F, "q4_0": 0xFF, "q4_1": 0xFF}}[extreme]
        blocks[...] = codes.get(kind, 0)
    blocks[..., :2] = np.array([1.0], np.float16).view(np.uint8)
    if kind == "q4_1":
        blocks[..., 2:4] = np.array([-3.0], np.float16).view(np.uint8)
    blocks = blocks.reshape(40, -1)
    for sign in (1, -1):
        x = rng.integers(-127, 128, (14, 96)).astype(np.float32)
        x[:5] = 127 * sign
        x[:, ::32] = 127  # so that the scale is 1 and x is not rounded
        expected = x.astype(np.int64) @ read_blocks(blocks, kind).values().astype(np.int64).T
        ops = ops_for(instruction_set)
        assert (product(ops, x, ops.pack_blocks(blocks, None, kind)) == expected).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_x_is_rounded_to_nearest_even(instruction_set: str) -> None:
    """A matrix of ones and zeros shows the rounded x itself."""
    eye = np.zeros((32, BLOCK_BYTES["q8_0"]), np.uint8)
    eye[:, :2] = np.array([1.0], np.float16).view(np.uint8)
    eye[:, 2:] = np.eye(32, dtype=np.uint8)
    x = normal(3, 64, 32) * np.float32(10) ** np.random.default_rng(1).uniform(-30, 30, (64, 1)).astype(np.float32)
    x[0] = np.arange(32) / 2 - 7.5  # ties
    x[0, 0] = 127
    x[1] = 0
    x[2] = 2.0**-121
    x[3] = 1e-44
    x[4, 5] = 3e38
    ops = ops_for(instruction_set)
    out = product(ops, x, ops.pack_blocks(eye, None, "q8_0"))
    rounded = round_groups(x, "int8")
    assert (out == rounded.values()).all()
    assert out[0].tolist() == np.rint(x[0]).tolist()
    assert (out[1:4] == 0).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_fails_its_row_and_no_other(
    instruction_set: str, form: str, special: float
) -> None:
    ops, x = ops_for(instruction_set), normal(2, 30, 96)
    packed = pack(ops, form, 40, 96)
    expected = product(ops, x, packed)
    x[[0, 13, 29], [95, 5, 0]] = special
    out = product(ops, x, packed)
    touched = np.isin(np.arange(30), [0, 13, 29])
    assert same_bits(out[~touched], expected[~touched])
    assert np.isnan(out[touched]).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_weights_that_are_zero_or_not_finite_or_extreme(instruction_set: str, dtype: str) -> None:
    weight, x = normal(1, 20, 70), normal(2, 5, 70)
    weight[0] = 0
    weight[1, 33] = np.nan
    weight[2, 69] = np.inf
    weight[3] *= np.float32(1e36)
    weight[4] *= np.float32(1e-34)
    weight[5] = 1e-40
    ops = ops_for(instruction_set)
    out = product(ops, x, ops.pack_linear(weight, None, dtype))
    assert (out[:, [0, 5]] == 0).all()
    assert np.isnan(out[:, [1, 2]]).all()
    assert np.isfinite(out[:, 3:]).all()
    expected = multiply(x, round_groups(weight, dtype))
    np.testing.assert_allclose(out[:, 3:5], expected[:, 3:5], rtol=1e-4)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 32), (33, 96), (300, 64)])
def test_embedding_gives_the_values_of_the_groups(
    instruction_set: str, form: str, num_outputs: int, num_inputs: int
) -> None:
    ops, meant = ops_for(instruction_set), pack(ReferenceOps(), form, num_outputs, num_inputs)
    assert isinstance(meant, ReferenceLinear)
    token_ids = np.append(np.random.default_rng(1).integers(0, num_outputs, 30), num_outputs - 1).astype(np.int32)
    out = np.empty((31, num_inputs), np.float32)
    ops.embedding(pack(ops, form, num_outputs, num_inputs), token_ids, out)
    assert same_bits(out + np.float32(0), meant.weight[token_ids] + np.float32(0))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_mean_what_gguf_says(kind: str) -> None:
    from gguf import quants

    blocks = random_blocks(5, 7, 96, kind)
    expected = getattr(quants, kind.upper()).dequantize_blocks(blocks.reshape(-1, BLOCK_BYTES[kind]))
    assert (read_blocks(blocks, kind).values() == expected.reshape(7, 96)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_every_f16_scale_is_taken_exactly(kind: str) -> None:
    """Denormals, infinities and NaN included; a damaged file must not give a plausible number."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    blocks = np.full((1 << 16, BLOCK_BYTES[kind]), 0x11, np.uint8)
    blocks[:, :2] = halves.view(np.uint8).reshape(-1, 2)
    if kind == "q4_1":
        blocks[:, 2:4] = 0
    code = {"q8_0": 0x11, "q4_0": 1 - 8, "q4_1": 1}[kind]
    x = np.zeros((1, 32), np.float32)
    x[0, 3] = 127
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = halves.view(np.float16).astype(np.float32) * np.float32(127 * code)
    for instruction_set in INSTRUCTION_SETS:
        ops = ops_for(instruction_set)
        out = product(ops, x, ops.pack_blocks(blocks, None, kind))[0]
        np.testing.assert_array_equal(out, expected)


def test_sizes_in_memory() -> None:
    ops = ops_for(INSTRUCTION_SETS[0])
    numbers = 96 * 1536
    sizes = {form: pack(ops, form, 96, 1536).num_bytes / numbers for form in FORMS}
    assert sizes == {"int8": 1.125, "q8_0": 1.125, "int4": 0.625, "q4_0": 0.625, "q4_1": 0.625}
    assert pack(ops, "q8_0", 16, 32).weights_dtype == "int8"
    assert pack(ops, "q4_1", 16, 32).weights_dtype == "int4"


def test_wrong_blocks_are_refused() -> None:
    ops = ops_for(INSTRUCTION_SETS[0])
    with pytest.raises(ValueError, match="'q5_0'"):
        ops.pack_blocks(np.zeros((2, 34), np.uint8), None, "q5_0")
    with pytest.raises(ValueError, match="whole number of blocks"):
        ops.pack_blocks(np.zeros((2, 35), np.uint8), None, "q8_0")
    with pytest.raises(ValueError, match="int3"):
        ops.pack_linear(normal(1, 8, 4), None, "int3")
