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
from octavo.kernels.weight_groups import (
    BLOCK_BYTES,
    Groups,
    most_code,
    multiply,
    read_blocks,
    round_groups,
    round_inputs,
)
from tests.kernels.test_linear import INSTRUCTION_SETS, normal, ops_for, same_bits

KINDS = list(BLOCK_BYTES)
WHOLE = "q4_1, whole minima"
BLOCK_FORMS = [*KINDS, WHOLE]
FORMS = ["int8", "int4", *BLOCK_FORMS]  # all ways in which a matrix comes to be packed
SHAPES = [(1, 1), (17, 3), (16, 31), (33, 33), (15, 64), (48, 575), (96, 1536), (200, 130)]
BLOCK_SHAPES = [(1, 32), (17, 64), (33, 576), (96, 1536)]


def kind_of(form: str) -> str:
    """Of GGUF's block, of a form that is one."""
    return form.split(",")[0]


def random_blocks(seed: int, num_outputs: int, num_inputs: int, form: str) -> U8:
    """Any codes, with scales and minima of the size that weights have."""
    rng, kind = np.random.default_rng(seed), kind_of(form)
    blocks = rng.integers(0, 256, (num_outputs, num_inputs // 32, BLOCK_BYTES[kind]), np.uint8)
    scales = rng.standard_normal((num_outputs, num_inputs // 32, 2)).astype(np.float16) * np.float16(0.01)
    blocks[..., :2] = np.ascontiguousarray(scales[..., :1]).view(np.uint8)
    if form == WHOLE:  # as of a model that was stored in bf16: 8 bits in the same few powers of 2
        scales = (rng.integers(-255, 256, scales.shape) * 2.0**-13).astype(np.float16)
    if kind == "q4_1":
        blocks[..., 2:4] = np.ascontiguousarray(scales[..., 1:]).view(np.uint8)
    return blocks.reshape(num_outputs, -1)


def pack(ops: NativeOps | ReferenceOps, form: str, num_outputs: int, num_inputs: int, seed: int = 1) -> PackedLinear:
    if form in BLOCK_FORMS:
        return ops.pack_blocks(random_blocks(seed, num_outputs, num_inputs, form), None, kind_of(form))
    return ops.pack_linear(normal(seed, num_outputs, num_inputs), None, form)


def product(ops: NativeOps | ReferenceOps, x: F32, packed: PackedLinear) -> F32:
    out = np.full((len(x), packed.num_outputs), np.nan, np.float32)
    ops.linear(x, packed, out)
    return out


def sum_of_magnitudes(x: F32, weight: Groups) -> F32:
    """What bounds the rounding of the additions."""
    parts = Groups(np.abs(weight.codes), np.abs(weight.scale), None, weight.size, weight.bits)
    total = multiply(np.abs(x), parts)
    if weight.minimum is not None:
        ones = Groups(np.ones_like(weight.codes), np.abs(weight.minimum), None, weight.size, weight.bits)
        total += multiply(np.abs(x), ones)
    return total


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize(
    ("form", "num_outputs", "num_inputs"),
    [(form, *shape) for form in FORMS for shape in (BLOCK_SHAPES if form in BLOCK_FORMS else SHAPES)],
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
@pytest.mark.parametrize("groups", [3, 4])  # of which minima are whole numbers in the second
@pytest.mark.parametrize("extreme", ["lowest", "highest", "random"])
def test_integer_sums_are_exact(instruction_set: str, kind: str, extreme: str, groups: int) -> None:
    """Scales of 1 and all codes, at their limits too: every sum is an integer below 2^24, so no bit may differ."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (40, groups, BLOCK_BYTES[kind]), np.uint8)
    if extreme != "random":
        codes = {"lowest": {"q8_0": 0x80}, "highest": {"q8_0": 0x7F, "q4_0": 0xFF, "q4_1": 0xFF}}[extreme]
        blocks[...] = codes.get(kind, 0)
    blocks[..., :2] = np.array([1.0], np.float16).view(np.uint8)
    if kind == "q4_1":
        blocks[..., 2:4] = np.array([-3.0], np.float16).view(np.uint8)
    blocks = blocks.reshape(40, -1)
    most = most_code(8 if kind == "q8_0" else 4)
    for sign in (1, -1):
        x = rng.integers(-most, most + 1, (50, 32 * groups)).astype(np.float32)
        x[:5] = most * sign
        x[5:10] *= np.where(
            np.arange(32 * groups) % 32 < 16, sign, -sign
        )  # the halves of a group are multiplied with each other
        x[:, ::32] = most  # so that the scale is 1 and x is not rounded
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
    assert (out == round_inputs(x).values()).all()
    assert out[0].tolist() == np.rint(x[0]).tolist()
    assert (out[1:4] == 0).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_scales_of_activations_have_four_sizes(bits: int) -> None:
    """A power of 2 times 1, 1.25, 1.5 or 1.75: the least that keeps codes within 127, or 120."""
    most = most_code(bits)
    x = normal(7, 200, 96) * np.float32(10) ** np.random.default_rng(2).uniform(-30, 30, (200, 1)).astype(np.float32)
    x[0, :64] = np.repeat([most, most + 0.001], 32)
    rounded, largest = round_inputs(x, bits), np.abs(x).reshape(200, 3, 32).max(axis=-1)
    sizes = np.frexp(rounded.scale)[0] * 2
    assert set(sizes.ravel().tolist()) == {1.0, 1.25, 1.5, 1.75}
    least = largest.astype(np.float64) / most
    assert (rounded.scale >= least * (1 - 2.0**-24)).all()
    below = np.where(sizes == 1, 1.75 / 2, sizes - 0.25) / sizes  # the next smaller scale is too small
    assert (rounded.scale * below < least).all()
    assert rounded.scale[0, :2].tolist() == [1.0, 1.25]
    assert np.abs(rounded.codes).max() == most
    assert (np.abs(rounded.values() - x).reshape(200, 3, 32).max(axis=-1) <= rounded.scale * 0.50001).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", ["none", "rows", "outlying", "weights"])
@pytest.mark.parametrize("rows", [30, 44])  # on one thread: enough for a table of scales, for crossed products
def test_products_of_scales_are_those_of_a_multiplication(
    instruction_set: str, form: str, change: str, rows: int
) -> None:
    """Rows alone multiply the scales; as many that share panels take the product from a table, where it is in one.

    rows: groups of zeros, of numbers so small or large that no entry is meant for them; outlying: and one that is
    rounded finely in all of them. weights: scales for which no table is made. Where a scale is zero, codes that are not
    mean nothing.
    """
    ops, num_inputs = ops_for(instruction_set, 1), 192
    if form in BLOCK_FORMS:
        blocks = random_blocks(8, 48, num_inputs, form).reshape(48, 6, -1)
        blocks[3, 2, :2] = 0
        if change == "weights":
            blocks[5, 1, :2] = np.array([np.inf], np.float16).view(np.uint8)
        packed = ops.pack_blocks(blocks.reshape(48, -1), None, kind_of(form))
    else:
        weight = normal(8, 48, num_inputs)
        weight[3, 64:96] = 0
        if change == "weights":
            weight[5] *= np.float32(2.0**-80)
        packed = ops.pack_linear(weight, None, form)
    x = normal(9, rows, num_inputs)
    if change == "outlying":
        x[:, 96:128] *= 300
    if change in ("rows", "outlying"):
        x[::7, 32:64] = 0
        x[1::7] *= np.float32(2.0**-95)
        x[2::7] *= np.float32(2.0**-115)
        x[3::7] *= np.float32(2.0**110)
    out = product(ops, x, packed)
    alone = np.concatenate([product(ops, x[row : row + 1], packed) for row in range(rows)])
    assert (
        np.isfinite(out).all(axis=0).tolist()
        == [True] * 5 + [form not in BLOCK_FORMS or change != "weights"] + [True] * 42
    )
    assert same_bits(np.delete(out, 5, axis=1), np.delete(alone, 5, axis=1))
    assert np.array_equal(out, alone, equal_nan=True)


@pytest.mark.parametrize("exponent", [-120, -118, -117, -114, -113, -100])
def test_small_outlying_groups_are_rounded_finely(exponent: int) -> None:
    x = np.zeros((1, 256), np.float32)
    x[0, :32] = np.linspace(0.5, 1, 32, dtype=np.float32) * np.float32(2.0**exponent)
    assert is_outlying(x)[0, 0]
    meant = round_inputs(x).values()
    assert (np.abs(meant - x) <= x.max() * 2.0**-14).all()
    eye = np.zeros((32, 8, BLOCK_BYTES["q8_0"]), np.uint8)
    eye[:, 0, :2] = np.array([1.0], np.float16).view(np.uint8)
    eye[:, 0, 2:] = np.eye(32, dtype=np.uint8)
    for instruction_set in INSTRUCTION_SETS:
        ops = ops_for(instruction_set)
        out = product(ops, x, ops.pack_blocks(eye.reshape(32, -1), None, "q8_0"))
        assert (out[0] == meant[0, :32]).all()


@pytest.mark.parametrize("form", ["q4_1", WHOLE])
@pytest.mark.parametrize("num_inputs", [6144, 6208])
@pytest.mark.parametrize("rows", [20, 44])
def test_the_largest_table_and_what_is_larger(num_inputs: int, form: str, rows: int) -> None:
    for instruction_set in INSTRUCTION_SETS:
        ops = ops_for(instruction_set, 1)
        packed, x = pack(ops, form, 32, num_inputs), normal(3, rows, num_inputs)
        alone = np.concatenate([product(ops, x[row : row + 1], packed) for row in range(rows)])
        assert same_bits(product(ops, x, packed), alone)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("form", ["q8_0", "q4_0"])
@pytest.mark.parametrize("groups", [511, 512, 513, 530])
def test_rows_of_very_many_groups(instruction_set: str, form: str, groups: int) -> None:
    """Scales of a row are found together, or one by one where there are too many: each group by itself shows them."""
    x = with_outlying_groups(groups, 3, 32 * groups)
    x[1, 64:96], x[2, 96:128] = 0, 1e-38
    meant = round_inputs(x, 8 if form == "q8_0" else 4)
    assert (np.abs(meant.codes).max(axis=-1) > 127).sum() > 20, "some groups are rounded finely"
    ops, shown = ops_for(instruction_set), [0, 1, 2, 3, 15, 16, 257, groups - 2, groups - 1]
    blocks = np.zeros((len(shown), groups, BLOCK_BYTES[form]), np.uint8)
    blocks[..., 2:] = 0 if form == "q8_0" else 0x88
    for output, group in enumerate(shown):
        blocks[output, group, :2] = np.array([1.0], np.float16).view(np.uint8)
        blocks[output, group, 2] += 1  # of the first input
    out = product(ops, x, ops.pack_blocks(blocks.reshape(len(shown), -1), None, form))
    assert (out == meant.values().reshape(3, groups, 32)[:, shown, 0]).all()


def with_outlying_groups(seed: int, rows: int, num_inputs: int) -> F32:
    """One group in nine is far larger than the others, and in some of them a single number is."""
    x, rng = normal(seed, rows, num_inputs), np.random.default_rng(seed)
    groups = x[:, : num_inputs // 32 * 32].reshape(rows, -1, 32)
    groups *= np.where(rng.random(groups.shape[:2]) < 1 / 9, np.float32(40), np.float32(1))[..., np.newaxis]
    groups[..., 5] *= np.where(rng.random(groups.shape[:2]) < 1 / 9, np.float32(300), np.float32(1))
    return x


def is_outlying(x: F32) -> np.ndarray:
    """[rows, groups]"""
    return np.abs(round_inputs(x).codes).max(axis=-1) > 127


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_outlying_groups_get_fifteen_bits(instruction_set: str) -> None:
    """A matrix of ones and zeros shows the rounded x itself; the same number is rounded otherwise in another row."""
    eye = np.zeros((192, 6, BLOCK_BYTES["q8_0"]), np.uint8)
    eye[..., :2] = np.array([1.0], np.float16).view(np.uint8)
    eye[..., 2:] = np.eye(192, dtype=np.uint8).reshape(192, 6, 32)
    x = np.tile(normal(3, 1, 192), (40, 1))
    for row, factor in enumerate(np.float32(2) ** np.arange(-20, 20)):
        x[row, 64:96] *= factor
    x[-1, 64:96] *= np.float32(1e30)
    ops, rounded = ops_for(instruction_set), round_inputs(x)
    out = product(ops, x, ops.pack_blocks(eye.reshape(192, -1), None, "q8_0"))
    assert (out == rounded.values()).all()
    fine = is_outlying(x)
    assert fine[:, 2].tolist() == sorted(fine[:, 2])
    assert 10 < fine[:, 2].sum() < 20
    assert not fine[:, [0, 1, 3, 4, 5]].any()
    error = np.abs(out - x).reshape(40, 6, 32).max(axis=-1)
    assert (error <= rounded.scale * 0.51).all()
    step = np.abs(x).reshape(40, 6, 32).max(axis=-1) / 127 * 1.25
    assert (rounded.scale <= step * np.where(fine, 1 / 128, 1)).all()
    assert (error[fine] > 0).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("code", [0x80, 0x7F])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_of_outlying_groups_are_exact(instruction_set: str, code: int, sign: int) -> None:
    """Every product at its limit: one conversion to f32 is the only rounding."""
    blocks = np.full((20, 5, BLOCK_BYTES["q8_0"]), code, np.uint8)
    blocks[..., :2] = np.array([1.0], np.float16).view(np.uint8)
    x = np.zeros((7, 160), np.float32)
    x[:, 96:128] = 127
    x[1::2, 97:128] -= np.arange(31, dtype=np.float32) / 128
    x *= sign
    assert is_outlying(x)[:, 3].all()
    exact = (x[:, 96:128].astype(np.float64) * 128).sum(axis=1) * np.int8(np.uint8(code))
    ops = ops_for(instruction_set)
    out = product(ops, x, ops.pack_blocks(blocks.reshape(20, -1), None, "q8_0"))
    assert (out == (exact.astype(np.float32) / np.float32(128))[:, np.newaxis]).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("form", FORMS)
def test_rows_with_outlying_groups_are_the_product_and_do_not_depend_on_their_neighbours(
    instruction_set: str, form: str
) -> None:
    """A tile works on high bytes for all its rows as soon as one row has some."""
    packed, meant = pack(ops_for(instruction_set), form, 72, 576), pack(ReferenceOps(), form, 72, 576)
    assert isinstance(meant, ReferenceLinear)
    assert meant.groups is not None
    x = with_outlying_groups(4, 40, 576)
    x[::3] = normal(5, 14, 576)  # rows with none
    fine = is_outlying(x)
    assert fine.any(axis=1).sum() > 20
    assert not fine[::3].any()
    alone = np.concatenate([product(ops_for(instruction_set), x[row : row + 1], packed) for row in range(40)])
    bound = sum_of_magnitudes(x, meant.groups) * 2.0**-23 * (2 * 18 + 3)
    assert (np.abs(alone - product(ReferenceOps(), x, meant)) <= bound).all()
    for first, last in [(0, 2), (1, 4), (2, 6), (3, 8), (5, 11), (6, 13), (0, 40)]:
        for num_threads in (1, 2):
            assert same_bits(product(ops_for(instruction_set, num_threads), x[first:last], packed), alone[first:last])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_fails_its_row_and_no_other(
    instruction_set: str, form: str, special: float
) -> None:
    ops, x = ops_for(instruction_set), normal(2, 30, 128)
    packed = pack(ops, form, 40, 128)
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
    x[0, 3] = most_code(8 if kind == "q8_0" else 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = halves.view(np.float16).astype(np.float32) * np.float32(x[0, 3] * code)
    for instruction_set in INSTRUCTION_SETS:
        ops = ops_for(instruction_set)
        out = product(ops, x, ops.pack_blocks(blocks, None, kind))[0]
        np.testing.assert_array_equal(out, expected)


def test_sizes_in_memory() -> None:
    ops = ops_for(INSTRUCTION_SETS[0])
    numbers = 96 * 1536
    sizes = {form: pack(ops, form, 96, 1536).num_bytes / numbers for form in FORMS}
    assert sizes == {"int8": 1.125, "q8_0": 1.125, "int4": 0.625, "q4_0": 0.625} | dict.fromkeys(
        ["q4_1", WHOLE], 0.625 + 4 / 1536
    )
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
