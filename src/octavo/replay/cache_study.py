"""Cache-only replay: what caches of every size would hit on a trace. Time, batches and running requests are left out.

It feeds `reuse` and reads the curve off; it knows no file format and prints nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from octavo.errors import ConfigError
from octavo.replay.cache_blocks import BlockSample, block_size_of, check_rate, named_blocks
from octavo.replay.dominance import I64
from octavo.replay.hit_curve import NUM_GROUPS, CurvePoint, HitCurve, SampledCurve, curve_sizes
from octavo.replay.reuse import NEVER, Lookups, ReuseDistances
from octavo.replay.trace import TraceRequest

PARTIAL_BLOCKS = ("whole", "tokens")
MAX_TENANTS = 1000  # that get a curve of their own; those that come later share one
OTHER_TENANTS = "(others)"
_CELLS = 160  # sizes at which a tenant's hits are kept, at most, and one for what needs more
_TENANT_SHIFT, _TOKENS_SHIFT, _TOKENS_MASK = 36, 4, (1 << 32) - 1  # a lookup's tag: tenant, tokens, part of the sample


@dataclass(frozen=True, slots=True)
class CacheStudyConfig:
    """`partial_blocks`: what the last, unfilled block of a prompt takes up: a whole block, as in the engine, or only
    its tokens, as published hit rates count.
    """

    block_size: int | None = None  # None: that of the trace, or the engine's own
    partial_blocks: str = "whole"
    sample: float = 1.0  # share of the blocks that is looked at
    max_blocks: int | None = None  # the largest cache of interest; bounds the memory that the study takes
    asked_blocks: int | None = None  # the cache to report on; None: one that keeps everything

    def __post_init__(self) -> None:
        if self.partial_blocks not in PARTIAL_BLOCKS:
            raise ConfigError(f"--partial-blocks is {self.partial_blocks!r}; it must be whole or tokens")
        check_rate(self.sample)
        for name in ("block_size", "max_blocks", "asked_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class TenantHits:
    """What one tenant's requests hit in the cache that all share."""

    tenant: str
    requests: int
    tokens: int
    blocks: int
    hit_blocks: int
    hit_tokens: int
    curve: tuple[CurvePoint, ...]


@dataclass(frozen=True, slots=True)
class CacheReport:
    """`at` is the cache that was asked about; `curve` has others as well, `unlimited` one that keeps everything."""

    requests: int
    tokens: int
    output_tokens: int
    blocks: int
    block_size: int
    distinct_blocks: int | None  # None where blocks were sampled, or deep ones forgotten
    at: CurvePoint
    unlimited: CurvePoint
    curve: tuple[CurvePoint, ...]
    tenants: tuple[TenantHits, ...]
    sample: float
    names_blocks: bool  # False: the trace has lengths only, so nothing in it can be seen to repeat


@dataclass(slots=True)
class _Tenant:
    name: str
    requests: int = 0
    tokens: int = 0
    blocks: int = 0
    hit_blocks: I64 = field(default_factory=lambda: np.zeros(_CELLS, np.int64))  # by the place of the size in the grid
    hit_tokens: I64 = field(default_factory=lambda: np.zeros(_CELLS, np.int64))


class CacheStudy:
    """Feed it requests in order, then ask for the report. One pass; memory as `ReuseDistances` says."""

    def __init__(self, config: CacheStudyConfig) -> None:
        self.config = config
        self._sample = BlockSample(config.sample) if config.sample < 1.0 else None
        self._sampled = SampledCurve(config.sample) if config.sample < 1.0 else None
        self._curve = HitCurve()
        self._block_size = 0
        self._requests = self._tokens = self._output_tokens = self._blocks = 0
        self._named = False
        self._tenants: dict[str, int] = {}
        self._of_tenant: list[_Tenant] = []
        self._distances: ReuseDistances | None = None
        sizes = np.geomspace(1, 1 << 38, _CELLS - 2)  # a tenant's curve has points a factor of 1.18 apart
        asked = [] if config.asked_blocks is None else [config.asked_blocks]
        self._grid: I64 = np.unique(np.concatenate((np.rint(sizes).astype(np.int64), np.array(asked, np.int64))))

    def add(self, request: TraceRequest) -> None:
        """Raises ConfigError where the blocks of the trace do not go with the block size."""
        size = self._check_size(block_size_of(request, self.config.block_size))
        blocks = named_blocks(request, size)
        tenant = self._tenant(request.tenant)
        of_tenant = self._of_tenant[tenant]
        count = len(blocks.names) or request.num_prompt_tokens // size
        self._requests += 1
        self._tokens += request.num_prompt_tokens
        self._output_tokens += request.num_output_tokens
        self._blocks += count
        of_tenant.requests += 1
        of_tenant.tokens += request.num_prompt_tokens
        of_tenant.blocks += count
        if not blocks.names and not blocks.produced:
            return
        self._named = True
        distances = self._distances
        assert distances is not None
        is_counted_by_tokens = self.config.partial_blocks == "tokens"
        names, produced, tokens, groups = blocks.names, blocks.produced, [size] * len(blocks.names), None
        if names:
            tokens[-1] = blocks.last_tokens
        if self._sample is not None:
            group = self._sample.group
            kept = [
                (name, worth, part) for name, worth in zip(names, tokens, strict=True) if (part := group(name)) >= 0
            ]
            names, tokens = [one[0] for one in kept], [one[1] for one in kept]
            groups = [one[2] for one in kept]
            produced = [name for name in produced if group(name) >= 0]
        tag = tenant << _TENANT_SHIFT
        if groups is not None:
            tags = [tag | worth << _TOKENS_SHIFT | part for worth, part in zip(tokens, groups, strict=True)]
        else:
            tags = [tag | size << _TOKENS_SHIFT] * len(names)
            if names:
                tags[-1] = tag | tokens[-1] << _TOKENS_SHIFT
        weights = tokens if is_counted_by_tokens else [1] * len(names)
        distances.add(names, weights, tags, produced, size if is_counted_by_tokens else 1)
        self._take()

    def report(self, num_points: int | None = 48) -> CacheReport:
        """num_points: sizes on the curve; None: every size at which it changes."""
        if self._distances is not None:
            self._distances.flush()
            self._take()
        largest = self._largest()
        asked = self.config.asked_blocks
        sizes = curve_sizes(largest, asked, num_points) if num_points is not None else self._curve.steps()
        everything = 1 << 62
        points = self._points([*sizes, everything])
        at = self._points([asked])[0] if asked is not None else points[-1]
        complete = self._sample is None and self.config.max_blocks is None
        return CacheReport(
            requests=self._requests,
            tokens=self._tokens,
            output_tokens=self._output_tokens,
            blocks=self._blocks,
            block_size=self._block_size,
            distinct_blocks=self._distances.num_kept if complete and self._distances is not None else None,
            at=at,
            unlimited=points[-1],
            curve=tuple(points[:-1]),
            tenants=tuple(self._tenant_hits(one) for one in self._of_tenant) if len(self._of_tenant) > 1 else (),
            sample=self.config.sample,
            names_blocks=self._named,
        )

    def _max_weight(self, size: int) -> int | None:
        limit = self.config.max_blocks
        if limit is None:
            return None
        if self._sample is not None:
            return max(1, round(limit * self._sample.rate))
        return limit * size if self.config.partial_blocks == "tokens" else limit

    def _largest(self) -> int:
        steps = self._curve.steps() if self._sampled is None else []
        if self._sampled is not None and self._distances is not None:
            steps = [round(self._distances.num_kept / self.config.sample)]
        return min(max(steps, default=1), self.config.max_blocks or (1 << 62))

    def _points(self, sizes: list[int]) -> list[CurvePoint]:
        if self._sampled is not None:
            return self._sampled.points(sizes, self._blocks, self._tokens)
        found = self._curve.points(sizes)
        share = self._curve.lookup_tokens / self._tokens if self._tokens else 0.0  # tails that no block covers
        return [CurvePoint(p.blocks, p.hit_blocks, p.hit_tokens, p.hit_rate, p.token_hit_rate * share) for p in found]

    def _check_size(self, size: int) -> int:
        if self._distances is None:
            self._block_size, self._distances = size, ReuseDistances(self._max_weight(size))
        elif size != self._block_size:
            raise ConfigError(
                f"the trace has requests in blocks of {size} and of {self._block_size} tokens; choose one with "
                "--block-size"
            )
        return size

    def _tenant(self, name: str) -> int:
        found = self._tenants.get(name)
        if found is None:
            if len(self._of_tenant) >= MAX_TENANTS:
                name = OTHER_TENANTS
                if name in self._tenants:
                    return self._tenants[name]
            found = self._tenants[name] = len(self._of_tenant)
            self._of_tenant.append(_Tenant(name))
        return found

    def _take(self) -> None:
        assert self._distances is not None
        for done in self._distances.take():
            self._count(done)

    def _count(self, done: Lookups) -> None:
        """Take in a batch of lookups."""
        tokens = done.tags >> _TOKENS_SHIFT & _TOKENS_MASK
        distances = done.distances
        if self.config.partial_blocks == "tokens":  # in blocks, rounded up: a cache has a whole number of them
            distances = np.where(distances == NEVER, NEVER, -(-distances // self._block_size))
        if self._sampled is not None:
            self._sampled.add(distances, tokens, done.tags & (NUM_GROUPS - 1))
            return
        self._curve.add(distances, tokens)
        if len(self._of_tenant) > 1:
            self._count_tenants(distances, tokens, done.tags >> _TENANT_SHIFT)

    def _count_tenants(self, distances: I64, tokens: I64, tenants: I64) -> None:
        hit = distances != NEVER
        cells = np.searchsorted(self._grid, distances[hit]) + tenants[hit] * _CELLS
        size = len(self._of_tenant) * _CELLS
        counts = np.bincount(cells, minlength=size).reshape(-1, _CELLS)
        worth = np.bincount(cells, weights=tokens[hit], minlength=size).reshape(-1, _CELLS).astype(np.int64)
        for index in np.unique(tenants[hit]):
            self._of_tenant[index].hit_blocks += counts[index]
            self._of_tenant[index].hit_tokens += worth[index]

    def _tenant_hits(self, one: _Tenant) -> TenantHits:
        blocks, tokens = np.cumsum(one.hit_blocks), np.cumsum(one.hit_tokens)
        asked = self.config.asked_blocks
        last = len(self._grid) if asked is None else int(np.searchsorted(self._grid, asked, side="right")) - 1
        largest = self._largest()
        curve = [
            CurvePoint(
                int(size),
                int(blocks[at]),
                int(tokens[at]),
                blocks[at] / one.blocks if one.blocks else 0.0,
                tokens[at] / one.tokens if one.tokens else 0.0,
            )
            for at, size in enumerate(self._grid)
            if size <= 2 * largest
        ]
        name, counts = one.name, (one.requests, one.tokens, one.blocks)
        return TenantHits(name, *counts, int(blocks[last]), int(tokens[last]), tuple(curve))
