"""Hits against the size of the cache, for every size at once, from the distances of lookups. No cache, no trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.replay.dominance import I64
from octavo.replay.reuse import NEVER

NUM_GROUPS = 16  # parts of a sample, from whose differences its error is known


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What a cache of so many blocks would give. The errors are one standard error; 0 where nothing was sampled."""

    blocks: int
    hit_blocks: int
    hit_tokens: int
    hit_rate: float
    token_hit_rate: float
    hit_rate_error: float = 0.0


class HitCurve:
    """Hits by the number of blocks that they need. Memory is in proportion to the largest distance."""

    def __init__(self) -> None:
        self.num_lookups = 0
        self.lookup_tokens = 0
        self._blocks: I64 = np.zeros(1, np.int64)  # by distance in blocks: hits that need exactly so many
        self._tokens: I64 = np.zeros(1, np.int64)

    def add(self, distances: I64, tokens: I64) -> None:
        """distances: in blocks, NEVER for a miss at any size; tokens: what each lookup is worth."""
        self.num_lookups += len(distances)
        self.lookup_tokens += int(tokens.sum())
        hit = distances != NEVER
        if not hit.any():
            return
        found, worth = distances[hit], tokens[hit]
        size = max(len(self._blocks), int(found.max()) + 1)
        if size > len(self._blocks):
            grown = max(size, 2 * len(self._blocks))
            self._blocks = np.pad(self._blocks, (0, grown - len(self._blocks)))
            self._tokens = np.pad(self._tokens, (0, grown - len(self._tokens)))
        self._blocks[:size] += np.bincount(found, minlength=size)
        self._tokens[:size] += np.bincount(found, weights=worth, minlength=size).astype(np.int64)

    def hits(self, blocks: int | None) -> tuple[int, int]:
        """Hit blocks and hit tokens of a cache of so many blocks; None: of any size."""
        end = len(self._blocks) if blocks is None else min(blocks + 1, len(self._blocks))
        return int(self._blocks[:end].sum()), int(self._tokens[:end].sum())

    def size_for(self, hit_tokens: int) -> int:
        """The smallest size that hits so many tokens; 0 for none."""
        if hit_tokens <= 0:
            return 0
        return int(np.searchsorted(np.cumsum(self._tokens), hit_tokens))

    def steps(self) -> list[int]:
        """The sizes at which another block begins to be hit: the whole curve has no other corners."""
        return np.flatnonzero(self._blocks).tolist()

    def points(self, sizes: list[int]) -> list[CurvePoint]:
        blocks, tokens = np.cumsum(self._blocks), np.cumsum(self._tokens)
        last = len(blocks) - 1
        found = []
        for size in sizes:
            hit_blocks, hit_tokens = int(blocks[min(size, last)]), int(tokens[min(size, last)])
            found.append(
                CurvePoint(
                    size,
                    hit_blocks,
                    hit_tokens,
                    _share(hit_blocks, self.num_lookups),
                    _share(hit_tokens, self.lookup_tokens),
                )
            )
        return found


class SampledCurve:
    """A curve from a sample of the blocks, in NUM_GROUPS parts. Distances of the sample stand for `1 / rate` as many.

    Sampling blocks by their name keeps or leaves out all lookups of a block (Waldspurger et al., "Efficient MRC
    construction with SHARDS", FAST 2015). As there (SHARDS-adj), lookups that the sample has too few or too many of,
    which are those of a few blocks that all requests have, count as hits at any size. The error is that of the mean of
    the parts.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._parts = [HitCurve() for _ in range(NUM_GROUPS)]

    def add(self, distances: I64, tokens: I64, groups: I64) -> None:
        scaled = np.where(distances == NEVER, NEVER, np.rint(distances / self.rate).astype(np.int64))
        for group, part in enumerate(self._parts):
            chosen = groups == group
            part.add(scaled[chosen], tokens[chosen])

    def points(self, sizes: list[int], num_lookups: int, lookup_tokens: int) -> list[CurvePoint]:
        """num_lookups, lookup_tokens: of the whole trace, which the sample stands for."""
        each = [part.points(sizes) for part in self._parts]
        blocks = np.array([[one.hit_blocks for one in points] for points in each], np.float64)
        tokens = np.array([[one.hit_tokens for one in points] for points in each], np.float64)
        missing = num_lookups * self.rate / NUM_GROUPS - np.array([[part.num_lookups] for part in self._parts])
        missing_tokens = lookup_tokens * self.rate / NUM_GROUPS - np.array([[p.lookup_tokens] for p in self._parts])
        rates, errors = _mean_and_error((blocks + missing) * _share(NUM_GROUPS, num_lookups * self.rate))
        token_rates, _ = _mean_and_error((tokens + missing_tokens) * _share(NUM_GROUPS, lookup_tokens * self.rate))
        return [
            CurvePoint(size, round(rate * num_lookups), round(token_rate * lookup_tokens), rate, token_rate, error)
            for size, rate, token_rate, error in zip(sizes, rates, token_rates, errors, strict=True)
        ]


def _mean_and_error(shares: npt.NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """shares: [NUM_GROUPS, sizes]. The mean over the parts, and its standard error."""
    mean = np.clip(shares.mean(axis=0), 0.0, 1.0)
    return mean.tolist(), (shares.std(axis=0, ddof=1) / NUM_GROUPS**0.5).tolist()


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


def curve_sizes(largest: int, asked: int | None = None, num_points: int = 48) -> list[int]:
    """Sizes from 1 to `largest`, evenly spread on a logarithmic scale, and the one that was asked about."""
    largest = max(1, largest)
    sizes = {round(float(size)) for size in np.geomspace(1, largest, num_points)} | {largest}
    return sorted(sizes | ({asked} if asked is not None else set()))
