"""Quantiles of many numbers in little memory: counts on a logarithmic scale, each within half a percent."""

from __future__ import annotations

import math

_STEP = math.log(1.01)
_SMALLEST = 1e-7


class Quantiles:
    """Of positive numbers; what is below 1e-7 counts as 0."""

    __slots__ = ("_counts", "count", "largest", "total")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.largest = 0.0

    def add(self, value: float, times: int = 1) -> None:
        cell = -1 if value < _SMALLEST else int(math.log(value / _SMALLEST) / _STEP)
        self._counts[cell] = self._counts.get(cell, 0) + times
        self.count += times
        self.total += value * times
        self.largest = max(self.largest, value)

    def quantile(self, share: float) -> float:
        """The number below which this share of them lies; 0 where there are none."""
        wanted, seen = share * self.count, 0
        for cell in sorted(self._counts):
            seen += self._counts[cell]
            if seen >= wanted and seen:
                return 0.0 if cell < 0 else min(self.largest, _SMALLEST * math.exp((cell + 0.5) * _STEP))
        return 0.0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def summary(self) -> dict[str, float]:
        found = {f"p{round(share * 100)}": self.quantile(share) for share in (0.5, 0.9, 0.95, 0.99)}
        return {**found, "mean": self.mean, "max": self.largest}
