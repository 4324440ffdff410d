"""Random numbers as a function: the same (seed, position) gives the same number on every machine and in every batch.

It holds no state, and does not know what its numbers are used for.
"""

from __future__ import annotations

from octavo.core.seeds import MASK, Words4, derive_seed, philox

__all__ = ["DRAW_KEY", "Words4", "derive_seed", "philox", "uniform"]

DRAW_KEY = 0x6F637461766F0001  # second key word: keeps draws and derived seeds (core/seeds.py) apart


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1), of 53 bits, that draws output token `position` of a request with this seed.

    `Ops.uniform_numbers` with `DRAW_KEY` gives many of them.
    """
    return float(philox((position & MASK, 0, 0, 0), (seed & MASK, DRAW_KEY))[0] >> 11) * 2.0**-53
