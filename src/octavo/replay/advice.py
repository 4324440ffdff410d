"""Which reuse a load pays for, and what each is worth: within a request, a shared beginning, talks, lower tiers.

It reads requests and reckons; it prints nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from octavo.replay.cache_blocks import block_size_of, named_blocks
from octavo.replay.cost_model import CostModel
from octavo.replay.hit_curve import HitCurve
from octavo.replay.reuse import ReuseDistances
from octavo.replay.sessions import Sessions
from octavo.replay.trace import TraceRequest

HOST_BYTES_PER_S = 25e9  # PCIe 4.0 x16, as copies between host and device reach it
DISK_BYTES_PER_S = 3e9  # a good NVMe drive
WORTH = 0.01  # a reuse pays where it saves this share of the time of all prefills
ENOUGH = 0.95  # of what it could save at most; for the size that it needs
MAX_TURNS = 24  # requests that are shown one by one, at most
_SHARED, _OWN = 0, 1
_KIND_SHIFT = 40


@dataclass(frozen=True, slots=True)
class Reuse:
    """One kind. Times are of the whole load on the machine that the cost model stands for."""

    name: str
    hit_tokens: int
    prompt_share: float
    prefill_s_saved: float
    ttft_s_saved: float  # for each request, in the mean
    bytes_needed: int  # of cache, for most of it
    pays: bool
    about: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a short trace: what it finds, and what is left to compute."""

    number: int
    session: int
    prompt_tokens: int
    hit_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Advice:
    requests: int
    sessions: int
    tokens: int
    prefill_s: float  # of all prompts, nothing reused
    device_blocks: int
    bytes_per_block: int
    reuses: tuple[Reuse, ...]
    turns: tuple[Turn, ...]  # empty where there are many requests
    cost: str


@dataclass(frozen=True, slots=True)
class Tiers:
    """Sizes in blocks: of the device's own cache, and of what is below it."""

    device: int
    host: int
    disk: int


class AdviceStudy:
    """Feed it a trace, then ask."""

    def __init__(self, cost: CostModel, tiers: Tiers, bytes_per_token: int, block_size: int | None = None) -> None:
        self._cost = cost
        self._tiers = tiers
        self._bytes_per_token = bytes_per_token
        self._asked_size = block_size
        self._size = 0
        self._sessions = Sessions()
        self._distances = ReuseDistances()
        self._curves = (HitCurve(), HitCurve())  # of shared beginnings, and of a talk's own past
        self._requests = self._tokens = 0
        self._prefill_s = self._without_cache_s = 0.0
        self._turns: list[Turn] = []

    def add(self, request: TraceRequest) -> None:
        self._size = size = block_size_of(request, self._asked_size)
        blocks = named_blocks(request, size)
        path: list[Hashable] = [*blocks.names, *blocks.produced]
        count = len(blocks.names)
        repeat = self._sessions.add(path, count, request.session)
        prompt, output = request.num_prompt_tokens, request.num_output_tokens
        self._requests += 1
        self._tokens += prompt
        self._prefill_s += self._cost.prefill_s(prompt)
        # Without a cache each token of the answer runs the whole text again.
        self._without_cache_s += self._cost.token_s * sum_of_lengths(prompt, output)
        tokens = [size] * count
        if tokens:
            tokens[-1] = blocks.last_tokens
        kinds = [_OWN if at < repeat.own else _SHARED for at in range(count)]
        tags = [kind << _KIND_SHIFT | worth for kind, worth in zip(kinds, tokens, strict=True)]
        self._distances.add(blocks.names, [1] * count, tags, blocks.produced)
        self._count()
        if self._requests <= MAX_TURNS:
            hit = min(sum(tokens[: repeat.known]), prompt - 1)
            seconds = self._cost.prefill_s(prompt, start=hit)
            self._turns.append(Turn(self._requests, repeat.session, prompt, hit, seconds))

    def advice(self) -> Advice:
        self._distances.flush()
        self._count()
        shared, own = self._curves
        reuses = (self._within(), self._kind("shared beginning", shared), self._kind("talks that go on", own))
        return Advice(
            self._requests,
            self._sessions.count,
            self._tokens,
            self._prefill_s,
            self._tiers.device,
            self._size * self._bytes_per_token,
            (*reuses, *self._below()),
            tuple(self._turns) if self._requests <= MAX_TURNS else (),
            self._cost.name,
        )

    def _count(self) -> None:
        for done in self._distances.take():
            kinds, tokens = done.tags >> _KIND_SHIFT, done.tags & ((1 << _KIND_SHIFT) - 1)
            for kind, curve in enumerate(self._curves):
                chosen = kinds == kind
                curve.add(done.distances[chosen], tokens[chosen])

    def _within(self) -> Reuse:
        """The cache itself: no token of an answer runs the text before it again."""
        saved = self._without_cache_s
        about = "kept while it runs; without it every token of an answer runs the whole text again"
        longest = max((turn.prompt_tokens for turn in self._turns), default=0)
        bytes_needed = longest * self._bytes_per_token
        return Reuse("within a request", 0, 0.0, saved, 0.0, bytes_needed, saved > 0, about)

    def _kind(self, name: str, curve: HitCurve) -> Reuse:
        _, tokens = curve.hits(self._tiers.device)
        _, all_tokens = curve.hits(None)
        needed = curve.size_for(round(ENOUGH * all_tokens))
        fits = f"{tokens / all_tokens:.0%} of what repeats fits the cache" if all_tokens else "nothing repeats"
        return self._reuse(name, tokens, 0.0, needed * self._size * self._bytes_per_token, fits)

    def _below(self) -> tuple[Reuse, Reuse]:
        """What is found in the host's memory or on disk beyond the device's cache, less the time to fetch it."""
        tiers, found = self._tiers, []
        above = sum(curve.hits(tiers.device)[1] for curve in self._curves)
        for name, size, speed in (
            ("host memory", tiers.device + tiers.host, HOST_BYTES_PER_S),
            ("disk", tiers.device + tiers.host + tiers.disk, DISK_BYTES_PER_S),
        ):
            tokens = sum(curve.hits(size)[1] for curve in self._curves) - above
            above += tokens
            fetch_s = tokens * self._bytes_per_token / speed
            need = size * self._size * self._bytes_per_token
            found.append(self._reuse(name, tokens, fetch_s, need, f"fetching takes {fetch_s:,.1f} s of it"))
        return found[0], found[1]

    def _reuse(self, name: str, tokens: int, cost_s: float, bytes_needed: int, about: str) -> Reuse:
        saved = tokens * self._cost.prefill_token_s - cost_s
        share = tokens / self._tokens if self._tokens else 0.0
        pays = saved > WORTH * self._prefill_s
        return Reuse(name, tokens, share, saved, saved / max(1, self._requests), bytes_needed, pays, about)


def sum_of_lengths(prompt: int, output: int) -> int:
    """Tokens that are run again for an answer, if nothing is kept: the text so far, for every token but the first."""
    return max(0, output - 1) * prompt + output * (output - 1) // 2
