"""Floats of 8 bits: a sign, some bits of exponent, the rest fraction, as in "FP8 Formats for Deep Learning" (2022).

Rounding is to nearest, ties to even. What is finite and too large becomes the largest number (a cache that clips is
better than one that forgets); a NaN stays one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SmallFloat:
    """A format of 8 bits."""

    fraction_bits: int
    bias: int
    largest: float
    has_infinity: bool  # else an infinity becomes a NaN

    def encode(self, x: F32) -> U8:
        x = np.ascontiguousarray(x, np.float32)
        sign = np.where(np.signbit(x), 0x80, 0).astype(np.uint8)
        finite = np.isfinite(x)
        size = np.minimum(np.where(finite, np.abs(x), 0), np.float32(self.largest)).astype(np.float64)
        least = 1 - self.bias  # the exponent of zero and of the smallest numbers too
        exponent = np.where(size > 0, np.maximum(np.frexp(size)[1] - 1, least), least)
        steps = np.rint(np.ldexp(size, self.fraction_bits - exponent))  # 2^fraction_bits and more, or a denormal
        code = ((exponent + self.bias - 1) * (1 << self.fraction_bits) + steps).astype(np.uint8)
        infinity = self.infinity if self.has_infinity else 0x7F
        code = np.where(finite, code, np.where(np.isnan(x), 0x7F, infinity)).astype(np.uint8)
        return code | sign

    @property
    def infinity(self) -> int:
        return 0x80 - (1 << self.fraction_bits)

    def decode(self, codes: U8) -> F32:
        return self.table()[codes]

    def table(self) -> F32:
        """The 256 values by code; all are bfloat16 values too."""
        code = np.arange(128)
        exponent, fraction = code >> self.fraction_bits, code & ((1 << self.fraction_bits) - 1)
        whole = np.where(exponent > 0, (1 << self.fraction_bits) + fraction, fraction).astype(np.float64)
        values = np.ldexp(whole, np.maximum(exponent, 1) - self.bias - self.fraction_bits)
        if self.has_infinity:
            values[self.infinity] = np.inf
            values[self.infinity + 1 :] = np.nan
        else:
            values[0x7F] = np.nan
        return np.concatenate([values, -values]).astype(np.float32)


E4M3 = SmallFloat(fraction_bits=3, bias=7, largest=448.0, has_infinity=False)
E5M2 = SmallFloat(fraction_bits=2, bias=15, largest=57344.0, has_infinity=True)
