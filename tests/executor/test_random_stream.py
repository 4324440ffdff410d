"""Random numbers are a function of (seed, position): known values, and numpy's own Philox as a second opinion."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.executor.random_stream import derive_seed, philox, uniform

WORD = st.integers(0, 2**64 - 1)


@given(WORD, WORD, WORD, WORD, WORD, WORD)
@settings(max_examples=100, deadline=None)
def test_philox_equals_numpys(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> None:
    counter = c0 + (c1 << 64) + (c2 << 128) + (c3 << 192)
    previous = (counter - 1) % 2**256  # numpy counts up before it draws
    theirs = np.random.Philox(counter=previous, key=k0 + (k1 << 64)).random_raw(4)
    assert philox((c0, c1, c2, c3), (k0, k1)) == tuple(int(word) for word in theirs)


def test_golden_values() -> None:
    assert philox((0, 0, 0, 0), (0, 0)) == (
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    )
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(-1, 5)] == GOLDEN_UNIFORM
    assert [derive_seed(0, 0), derive_seed(0, 1), derive_seed(7, 3)] == GOLDEN_SEEDS


def test_uniform_is_in_range_and_even() -> None:
    numbers = np.array([uniform(3, position) for position in range(20_000)])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert float(((counts - 200) ** 2 / 200).sum()) < 160  # chi-square, 99 degrees of freedom, p about 1e-4


def test_seeds_and_positions_do_not_repeat_each_other() -> None:
    numbers = {uniform(seed, position) for seed in range(100) for position in range(100)}
    assert len(numbers) == 10_000
    seeds = {derive_seed(seed, index) for seed in range(100) for index in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)


GOLDEN_UNIFORM = [0.04954191432119859, 0.043684510981483404, 0.26562238369601376, 0.42118640624510273]
GOLDEN_SEEDS = [8175799161253641514, 6145087436983579591, 5557123509971941605]
