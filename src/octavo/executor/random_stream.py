"""Random numbers as a function: the same (seed, position) gives the same number on every machine and in every batch.

Philox4x64-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in Python integers.
It holds no state, and does not know what its numbers are used for.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_MULTIPLIER_0 = 0xD2E7470EE14C6C93
_MULTIPLIER_1 = 0xCA5A826395121157
_WEYL_0 = 0x9E3779B97F4A7C15
_WEYL_1 = 0xBB67AE8584CAA73B
_ROUNDS = 10
_DRAW_KEY = 0x6F637461766F0001  # second key word: keeps draws and derived seeds apart
_SEED_KEY = 0x6F637461766F0002

Words4 = tuple[int, int, int, int]


def philox(counter: Words4, key: tuple[int, int]) -> Words4:
    """One block of Philox4x64-10: four words of 64 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> 64) ^ c1 ^ k0,
            product_1 & _MASK,
            (product_0 >> 64) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0 = (k0 + _WEYL_0) & _MASK
        k1 = (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1), of 53 bits, that draws output token `position` of a request with this seed."""
    return float(philox((position & _MASK, 0, 0, 0), (seed & _MASK, _DRAW_KEY))[0] >> 11) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """Seed `index` of the seeds that one seed stands for: from 0 to 2**63 - 1, a function of its arguments alone."""
    return philox((index & _MASK, 0, 0, 0), (seed & _MASK, _SEED_KEY))[0] >> 1
