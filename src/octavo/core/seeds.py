"""Seeds that one seed stands for, as a function: the same on every machine, in every process.

Philox4x64-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in Python integers.
It holds no state, and does not know what is drawn with a seed.
"""

from __future__ import annotations

MASK = (1 << 64) - 1
_MULTIPLIER_0 = 0xD2E7470EE14C6C93
_MULTIPLIER_1 = 0xCA5A826395121157
_WEYL_0 = 0x9E3779B97F4A7C15
_WEYL_1 = 0xBB67AE8584CAA73B
_ROUNDS = 10
# The second key word keeps the uses of one seed apart; 0x...0001 is for draws (executor/random_stream.py).
_SEED_KEY = 0x6F637461766F0002
_BRANCH_KEY = 0x6F637461766F0003

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
            product_1 & MASK,
            (product_0 >> 64) ^ c3 ^ k1,
            product_0 & MASK,
        )
        k0 = (k0 + _WEYL_0) & MASK
        k1 = (k1 + _WEYL_1) & MASK
    return c0, c1, c2, c3


def derive_seed(seed: int, index: int) -> int:
    """Seed `index` of the seeds that one seed stands for: from 0 to 2**63 - 1, a function of its arguments alone."""
    return philox((index & MASK, 0, 0, 0), (seed & MASK, _SEED_KEY))[0] >> 1


def branch_seed(seed: int, branch: int) -> int:
    """What branch `branch` of a request with this seed draws with; branch 0 is the request as it would be alone.

    A separate request with this seed gives the same text.
    """
    return seed if branch == 0 else philox((branch & MASK, 0, 0, 0), (seed & MASK, _BRANCH_KEY))[0] >> 1
