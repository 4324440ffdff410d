"""In numpy, what weights in groups of 32 inputs mean, and how activations are rounded beside them.

A group has codes and an f32 scale (4-bit groups of GGUF's q4_1 a minimum too). Of a product, the sums over a group are
integers and exact; only the additions of groups are rounded. Activations are rounded to int8, but for outlying groups
of a row, which would bring most of its error: they get 15 bits. Their scales are of four sizes between two powers of 2,
so that kernels can have the products of two scales from a table. What minima bring is one whole number for all groups,
where the minima of an output have few enough bits between them. Beside 4-bit weights, codes of activations are 120 at
most: kernels add codes of both within a byte. It knows no layout of the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]

GROUP = 32
LEAST = np.float32(2.0**-120)  # a group whose numbers are all smaller counts as zeros
SCALE_STEP = np.uint32(1 << 21)  # of the bits of an activation's scale: it is a power of 2 times 1, 1.25, 1.5 or 1.75
MOST_WHOLE_GROUPS, MOST_WHOLE = 1024, 1 << 21  # of groups, and of groups * 2^bits: see `whole_minima`
OUTLYING = np.float32(4)  # times the mean of a row's groups: from there on a group's largest number is outlying
BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}  # GGUF's blocks that groups hold without a second rounding


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows in groups: number = scale * code + minimum."""

    codes: I32  # [rows, groups, 32]
    scale: F32  # [rows, groups]
    minimum: F32 | None  # [rows, groups]
    size: int  # of a row; the last group is padded with zeros
    bits: int = 8  # of a code, for groups of weights

    def values(self) -> F32:
        """[rows, size], as the embedding gives them."""
        values = self.codes.astype(np.float32) * self.scale[..., np.newaxis]
        if self.minimum is not None:
            values += self.minimum[..., np.newaxis]
        return values.reshape(len(values), -1)[:, : self.size]


def round_groups(values: F32, weights_dtype: str) -> Groups:
    """int8: scale = largest absolute value / 127; int4: the largest becomes -8. To nearest, ties to even.

    A group with a number that is not finite gets codes of 0 and a scale of NaN.
    """
    size = values.shape[1]
    padded = _in_groups(values)
    finite = np.isfinite(padded).all(axis=-1)
    padded[~finite] = 0
    where = np.abs(padded).argmax(axis=-1)[..., np.newaxis]
    largest = np.take_along_axis(padded, where, axis=-1)[..., 0]
    live = np.abs(largest) >= LEAST
    largest = np.where(live, largest, np.float32(1))
    if weights_dtype == "int8":
        largest = np.abs(largest)
    steps = np.float32(127 if weights_dtype == "int8" else -8)
    inverse = np.where(live, steps / largest, np.float32(0))
    codes = np.rint(padded * inverse[..., np.newaxis]).astype(np.int32)
    scale = np.where(live, largest / steps, np.float32(0))
    scale[~finite] = np.nan
    scale = scale.astype(np.float32)
    return (
        Groups(codes, scale, None, size)
        if weights_dtype == "int8"
        else Groups(np.minimum(codes, 7), scale, None, size, 4)
    )


def most_code(weight_bits: int) -> int:
    """The largest code of activations beside weights of so many bits."""
    return 127 if weight_bits == 8 else 120


def round_inputs(values: F32, weight_bits: int = 8) -> Groups:
    """To codes of -most to most (`most_code`); outlying groups in steps of a 128th. To nearest, ties to even.

    scale: the least of those that `SCALE_STEP` leaves, at least largest absolute value * (1 / most). Whether a group is
    outlying depends on its row alone. A group with a number that is not finite gets codes of 0 and a scale of NaN.
    """
    most = np.float32(most_code(weight_bits))
    padded = _in_groups(values)
    largest = np.abs(padded).max(axis=-1)
    finite = np.isfinite(largest)
    live = finite & (largest >= LEAST)
    with np.errstate(over="ignore", invalid="ignore"):  # a row with a number that is not finite has no outlying group
        sums = np.add.accumulate(largest, axis=-1, dtype=np.float32)[:, -1:]  # one by one, as the kernels add
        outlying = live & (largest > OUTLYING * (sums / np.float32(largest.shape[1])))
    least = np.where(live, largest, most) * (np.float32(1) / most)
    scale = ((least.view(np.uint32) + SCALE_STEP - np.uint32(1)) & ~(SCALE_STEP - np.uint32(1))).view(np.float32)
    steps = np.where(outlying, np.float32(128), np.float32(1))[..., np.newaxis]
    padded[~live] = 0
    codes = np.rint(padded * (np.float32(1) / scale)[..., np.newaxis] * steps).astype(np.int32)
    scale = np.where(outlying, scale / np.float32(128), np.where(live, scale, np.float32(0)))
    scale[~finite] = np.nan
    return Groups(codes, scale.astype(np.float32), None, values.shape[1])


def read_blocks(blocks: U8, kind: str) -> Groups:
    """GGUF blocks [rows, bytes of a row] as they are."""
    cut = blocks.reshape(len(blocks), -1, BLOCK_BYTES[kind])
    scale = _f16(cut[..., :2])
    size = cut.shape[1] * GROUP
    if kind == "q8_0":
        return Groups(cut[..., 2:].view(np.int8).astype(np.int32), scale, None, size)
    packed = cut[..., -GROUP // 2 :]
    codes = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int32)
    if kind == "q4_0":
        return Groups(codes - 8, scale, None, size, 4)
    return Groups(codes, scale, _f16(cut[..., 2:4]), size, 4)


def whole_minima(weight: Groups) -> tuple[I32, F32] | None:
    """The minima as whole numbers of 16 bits [rows, groups], and the units [rows], powers of 2; None: they have none.

    They are where groups are an even number of at most 1,024, no minimum is rounded by it, and all have so few bits
    that enough are left for what they are multiplied by (`round_factors`): groups * 2^bits is 2^21 at most.
    """
    minimum = weight.minimum
    if (
        minimum is None
        or minimum.shape[1] % 2
        or minimum.shape[1] > MOST_WHOLE_GROUPS
        or not np.isfinite(minimum).all()
    ):
        return None
    fraction, exponent = np.frexp(minimum.astype(np.float64))  # 0.5 <= fraction < 1, of 11 bits
    whole = np.abs(np.ldexp(fraction, 11)).astype(np.int32)
    low_bit = np.frexp((whole & -whole).astype(np.float64))[1] - 1
    lowest = np.where(whole > 0, exponent - 11 + low_bit, 16).min(axis=1, initial=16)
    unit = np.ldexp(1.0, lowest)
    if (np.abs(minimum).max(axis=1) > 32767 * unit).any():
        return None
    found = np.rint(minimum / unit[:, np.newaxis]).astype(np.int32)
    if minimum.shape[1] << int(np.abs(found).max()).bit_length() > MOST_WHOLE:
        return None
    return found, unit.astype(np.float32)


def factors_of(rounded: Groups) -> F32:
    """What minima are multiplied by [rows, groups]: scale * sum of codes."""
    with np.errstate(over="ignore"):
        factors: F32 = rounded.scale * rounded.codes.sum(axis=-1).astype(np.float32)
    return factors


def is_fine(rounded: Groups) -> npt.NDArray[np.bool_]:
    """Which groups have more than 8 bits [rows, groups]."""
    fine: npt.NDArray[np.bool_] = np.abs(rounded.codes).max(axis=-1) > 127
    return fine


def round_factors(rounded: Groups, minimum_bits: int) -> tuple[I32, F32]:
    """What whole minima are multiplied by: scale * sum of codes, as 16 bits [rows, groups]; units [rows], powers of 2.

    A row's unit is the least in which each has 16 bits, and sums of products with minima below 2^minimum_bits have 31;
    NaN where one is not finite. Those of outlying groups are 0 here: they are not rounded, but multiplied in f32.
    """
    factors = np.where(is_fine(rounded), np.float32(0), factors_of(rounded))
    sizes = np.add.accumulate(np.abs(factors), axis=-1, dtype=np.float64)[:, -1]  # one by one, as the kernels add
    finite = np.isfinite(sizes)
    by_sum = 29 + 1023 - minimum_bits - (sizes.view(np.int64) >> 52)
    by_largest = 14 + 127 - (np.abs(factors).max(axis=-1).view(np.int32) >> 23)
    power = np.where(finite, np.minimum(np.minimum(by_sum, by_largest), 126), 0)
    with np.errstate(over="ignore", invalid="ignore"):
        whole = np.rint(factors * np.ldexp(np.float32(1), power)[:, np.newaxis])
    whole = np.where(finite[:, np.newaxis], np.minimum(whole, np.float32(32767)), np.float32(0)).astype(np.int32)
    return whole, np.where(finite, np.ldexp(np.float32(1), -power), np.float32(np.nan)).astype(np.float32)


def multiply(x: F32, weight: Groups) -> F32:
    """x [m, size] @ weight.T; x is rounded by `round_inputs`, and groups are added in ascending order.

    What minima bring is added with each group, or, where they are whole numbers, behind all of them, but before the
    group for outlying groups.
    """
    rounded, whole = round_inputs(x, weight.bits), whole_minima(weight)
    total = np.zeros((len(x), len(weight.codes)), np.float64)
    factors, fine = factors_of(rounded), is_fine(rounded)

    def add(total: F64, factor: F32, minimum: F32) -> F64:
        return _to_f32(factor[:, np.newaxis].astype(np.float64) * minimum[np.newaxis].astype(np.float64) + total)

    for group in range(weight.codes.shape[1]):
        minimum = None if weight.minimum is None else weight.minimum[:, group]
        if minimum is not None and whole is not None and fine[:, group].any():
            total = np.where(fine[:, group, np.newaxis], add(total, factors[:, group], minimum), total)
        exact = rounded.codes[:, group] @ weight.codes[:, group].T
        scale = rounded.scale[:, group, np.newaxis] * weight.scale[np.newaxis, :, group]
        total = _to_f32(exact * scale.astype(np.float64) + total)
        if minimum is not None and whole is None:
            total = add(total, factors[:, group], minimum)
    if whole is not None:
        minima, units = whole
        whole_factors, row_units = round_factors(rounded, int(np.abs(minima).max()).bit_length())
        exact = (whole_factors @ minima.T).astype(np.float32)
        total = exact.astype(np.float64) * (row_units[:, np.newaxis] * units).astype(np.float64) + total
    return total.astype(np.float32)


def _to_f32(values: F64) -> F64:
    """Rounded to f32, and wide again."""
    return values.astype(np.float32).astype(np.float64)


def _in_groups(values: F32) -> F32:
    """[rows, groups, 32], padded with zeros."""
    rows, size = values.shape
    padded = np.zeros((rows, -(-size // GROUP), GROUP), np.float32)
    padded.reshape(rows, -1)[:, :size] = values
    return padded


def _f16(pairs: U8) -> F32:
    return np.ascontiguousarray(pairs).view("<f2")[..., 0].astype(np.float32)
