"""In numpy, what token is drawn from a row of logits; the native kernel gives the same ids, bit for bit.

Weights are whole numbers: e^((logit - highest) / temperature) * 2**32, rounded. So every sum of them is exact, whatever
its order, and a draw is the same on every instruction set. What is less likely than the likeliest by 2**33 is never
drawn. It does not know penalties, seeds or what a token means.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.core.seeds import MASK, philox
from octavo.kernels.ops import F32, F64, I32

I64 = npt.NDArray[np.int64]

HIGHEST_WEIGHT = np.float32(2.0**32)
LEAST_TEMPERATURE = 1e-30  # below it a float32 is 0; only equal logits can tell such temperatures apart
_LEAST_EXPONENT = np.float32(-64.0)
_PER_TWO = np.float32(1.44269504)
_TWO_HIGH, _TWO_LOW = np.float32(0.693359375), np.float32(2.12194440e-4)  # ln 2 is their difference
_TAYLOR = tuple(np.float32(1.0) / np.float32(n) for n in (720, 120, 24, 6, 2, 1, 1))


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """How one token is drawn: temperature 0 takes the highest logit; `number` is from [0, 1)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    number: float = 0.0


def uniform_numbers(seeds: list[int], positions: list[int], second_key: int) -> F64:
    """The number in [0, 1), of 53 bits, of each pair."""
    pairs = zip(seeds, positions, strict=True)
    words = [philox((position & MASK, 0, 0, 0), (seed & MASK, second_key))[0] >> 11 for seed, position in pairs]
    return np.array(words, np.float64) * 2.0**-53


def draw(logits: F32, rows: I32, settings: F64, must_be_finite: bool, out: I32) -> None:
    """As `Ops.draw`."""
    for index, (row, values) in enumerate(zip(rows, settings, strict=True)):
        temperature, top_k, top_p, min_p, number = values.tolist()
        one = DrawSettings(temperature, int(top_k), top_p, min_p, number)
        out[index] = draw_row(logits[row], one, must_be_finite)


def draw_row(row: F32, settings: DrawSettings, must_be_finite: bool = True) -> int:
    """The id, or -1 where the highest logit, or any that must be, is not finite."""
    if must_be_finite and not np.isfinite(row).all():
        return -1
    best = int(row.argmax())  # the first of equals
    if not np.isfinite(row[best]):
        return -1
    if settings.temperature == 0.0:
        return best
    weights = weights_of(row, row[best], settings.temperature)
    ids = np.flatnonzero(weights >= max(np.float32(settings.min_p) * HIGHEST_WEIGHT, np.float32(1.0)))
    if 0 < settings.top_k < len(row) or settings.top_p < 1.0:
        ids = np.sort(_likeliest(weights, ids, settings))
    return int(ids[invert(weights[ids], settings.number)])


def weights_of(row: F32, highest: np.float32, temperature: float) -> F64:
    """Whole numbers from 0 to 2**32. Each line is one rounding in float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        x = row - highest
        x = x * (np.float32(1.0) / np.float32(max(temperature, LEAST_TEMPERATURE)))
    x = np.maximum(x, _LEAST_EXPONENT)
    n = np.rint(x * _PER_TWO)
    r = x - n * _TWO_HIGH
    r = r + n * _TWO_LOW
    y = np.full_like(r, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        y = y * r
        y = y + coefficient
    return np.asarray(np.rint(np.ldexp(y, n.astype(np.int32) + 32)), np.float64)


def _likeliest(weights: F64, ids: I64, settings: DrawSettings) -> I64:
    """Of these ids what top_k, and of that what top_p leaves: highest weight first, lowest id first among equals."""
    ids = ids[np.argsort(-weights[ids], kind="stable")]
    if settings.top_k > 0:
        ids = ids[: settings.top_k]
    if settings.top_p < 1.0:
        sums = np.cumsum(weights[ids])
        ids = ids[: int(np.searchsorted(sums, settings.top_p * float(sums[-1]), side="left")) + 1]
    return ids


def invert(weights: F64, number: float) -> int:
    """The index at which the cumulative sum of the weights passes number, from [0, 1), of all of it."""
    sums = np.cumsum(weights)
    index = int(np.searchsorted(sums, number * float(sums[-1]), side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))  # the product may round up to the whole sum
