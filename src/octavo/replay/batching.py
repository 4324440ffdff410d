"""Requests of known lengths through an allocator, step by step, in virtual time: who runs, what is set aside, how long.

Iteration-level batching as in Orca (Yu et al., OSDI 2022): a request starts when there is room for it and leaves with
its last token. `whole_batches` instead starts a batch when the one before has ended, as FasterTransformer does. It
knows no prefixes and no tokens: for those there is the timed mode, which runs the engine's own scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.replay.allocators import Allocator, Lengths
from octavo.replay.cost_model import CostModel, StepWork


@dataclass(frozen=True, slots=True)
class BatchLimits:
    max_num_seqs: int = 256
    whole_batches: bool = False


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """Of all slots, over the time in which somebody waited for room. They add up to 1."""

    used: float  # tokens are there
    reserved: float  # will be used by the request that holds them
    internal: float  # set aside, and never used
    external: float  # set aside for nobody, though somebody waits


@dataclass(frozen=True, slots=True)
class Outcome:
    allocator: str
    shares: MemoryShares
    max_concurrency: int
    mean_concurrency: float
    requests: int
    output_tokens: int
    duration_s: float
    preemptions: int
    latency_s_per_token: float  # mean over the requests of (end - arrival) / tokens of the answer

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.duration_s if self.duration_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0


@dataclass(slots=True)
class _Running:
    number: int
    lengths: Lengths
    aside: int  # slots that are set aside
    until: int  # step in which it gets its last token

    @property
    def usable(self) -> int:
        """Slots of what is set aside that will be used."""
        return min(self.lengths.stored, self.aside)


@dataclass(slots=True)
class _Sums:
    """Over all that run; and their integrals over the time in which somebody waited."""

    tokens: int = 0
    aside: int = 0
    usable: int = 0
    waited_s: float = 0.0
    used_s: float = 0.0
    reserved_s: float = 0.0
    internal_s: float = 0.0
    running_s: float = 0.0

    def spend(self, seconds: float, num_running: int, *, is_waited_for: bool) -> None:
        self.running_s += num_running * seconds
        if is_waited_for:
            self.waited_s += seconds
            self.used_s += self.tokens * seconds
            self.reserved_s += (self.usable - self.tokens) * seconds
            self.internal_s += (self.aside - self.usable) * seconds


@dataclass(slots=True)
class _State:
    now: float = 0.0
    step: int = 0
    preemptions: int = 0
    max_concurrency: int = 0
    latency: float = 0.0
    arrived: int = 0
    num_active: int = 0  # those that run and have not got their last token
    held: list[int] = field(default_factory=list)  # of a whole batch: those that have
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # number, tokens that it has already
    running: dict[int, _Running] = field(default_factory=dict)  # in the order of their starts
    ends: dict[int, list[int]] = field(default_factory=dict)  # step -> numbers; some may have been preempted since
    grows: dict[int, list[int]] = field(default_factory=dict)
    sums: _Sums = field(default_factory=_Sums)


class Batching:
    """One load on one allocator."""

    def __init__(self, allocator: Allocator, cost: CostModel, limits: BatchLimits) -> None:
        self._allocator = allocator
        self._cost = cost
        self._limits = limits
        self._state = _State()

    def run(self, load: Sequence[Lengths], arrivals_s: Sequence[float] | None = None) -> Outcome:
        """Every request of the load, in order. Without arrivals all are there from the beginning."""
        state, allocator, sums = self._state, self._allocator, self._state.sums
        arrivals = arrivals_s or [0.0] * len(load)
        while state.running or state.waiting or state.arrived < len(load):
            if not state.running and not state.waiting:
                state.now = max(state.now, arrivals[state.arrived])
            while state.arrived < len(load) and arrivals[state.arrived] <= state.now:
                state.waiting.append((state.arrived, load[state.arrived].prompt))
                state.arrived += 1
            self._grow()
            num_old = state.num_active
            prompt_tokens, pairs = self._start(load)
            state.max_concurrency = max(state.max_concurrency, len(state.running))
            decoded = sums.tokens - prompt_tokens  # what the rows of one token each read
            work = StepWork(num_old + prompt_tokens, state.num_active, sums.tokens, pairs + decoded)
            seconds = self._cost.step_s(work)
            sums.spend(seconds, len(state.running), is_waited_for=bool(state.waiting))
            state.now += seconds
            self._end(load, arrivals)
            state.step += 1
        total = allocator.num_slots * sums.waited_s or 1.0
        used, reserved, internal = (one / total for one in (sums.used_s, sums.reserved_s, sums.internal_s))
        return Outcome(
            allocator.name,
            MemoryShares(used, reserved, internal, 1.0 - used - reserved - internal if sums.waited_s else 0.0),
            state.max_concurrency,
            sums.running_s / state.now if state.now else 0.0,
            len(load),
            sum(one.output for one in load),
            state.now,
            state.preemptions,
            state.latency / len(load) if load else 0.0,
        )

    def _grow(self) -> None:
        """Room for the token that each running request stores in this step."""
        state = self._state
        for number in state.grows.pop(state.step, ()):
            one = state.running.get(number)
            if one is None or one.aside != self._tokens_at(one, state.step) - 1:
                continue  # preempted since
            aside = self._allocator.grow(number, one.aside + 1)
            while aside is None:
                last = next(reversed(state.running))
                self._preempt(state.running[last])
                if last == number:
                    break
                aside = self._allocator.grow(number, one.aside + 1)
            if aside is not None:
                self._set_aside(one, aside)
        state.sums.tokens += state.num_active

    @staticmethod
    def _tokens_at(one: _Running, step: int) -> int:
        """Tokens that it stores once this step has run."""
        return one.lengths.stored - (one.until - step)

    def _set_aside(self, one: _Running, aside: int) -> None:
        sums = self._state.sums
        sums.aside += aside - one.aside
        sums.usable -= one.usable
        one.aside = aside
        sums.usable += one.usable
        if one.lengths.stored > aside:  # the step in which it stores one token more than that
            at = one.until - (one.lengths.stored - aside) + 1
            self._state.grows.setdefault(at, []).append(one.number)

    def _start(self, load: Sequence[Lengths]) -> tuple[int, int]:
        """Let those start that have room. Returns the tokens that they run, and their pairs of query and key."""
        state, tokens, pairs = self._state, 0, 0
        if self._limits.whole_batches and state.running:
            return 0, 0
        while state.waiting and len(state.running) < self._limits.max_num_seqs:
            number, known = state.waiting[0]
            lengths = load[number]
            aside = self._allocator.start(number, lengths, known)
            if aside is None:
                assert state.running, f"request {number} of {lengths.stored} tokens does not fit by itself"
                break
            state.waiting.popleft()
            # Running the known tokens gives one more; each later step stores one.
            until = state.step + lengths.stored - known
            one = _Running(number, lengths, 0, until)
            state.running[number] = one
            state.num_active += 1
            state.sums.tokens += known
            self._set_aside(one, aside)
            state.ends.setdefault(until, []).append(number)
            tokens += known
            pairs += known * known // 2
        return tokens, pairs

    def _end(self, load: Sequence[Lengths], arrivals: Sequence[float]) -> None:
        state = self._state
        for number in state.ends.pop(state.step, ()):
            one = state.running.get(number)
            if one is None or one.until != state.step:
                continue
            state.num_active -= 1
            state.sums.tokens -= one.lengths.stored
            if self._limits.whole_batches:  # its room stays taken until the batch ends
                state.sums.usable -= one.usable
                one.lengths = Lengths(1, 1)
                state.sums.usable += one.usable
                state.held.append(number)
            else:
                self._leave(one, (state.now - arrivals[number]) / load[number].output)
        if state.held and not state.num_active:
            for number in state.held:
                self._leave(state.running[number], (state.now - arrivals[number]) / load[number].output)
            state.held.clear()

    def _leave(self, one: _Running, latency: float) -> None:
        """latency: seconds for each token of the answer, from its arrival on."""
        state = self._state
        state.latency += latency
        del state.running[one.number]
        state.sums.aside -= one.aside
        state.sums.usable -= one.usable
        self._allocator.release(one.number)

    def _preempt(self, one: _Running) -> None:
        """It loses what it stored, and waits again with the tokens that it has."""
        state = self._state
        known = self._tokens_at(one, state.step - 1)
        del state.running[one.number]
        state.num_active -= 1
        state.sums.tokens -= known
        state.sums.aside -= one.aside
        state.sums.usable -= one.usable
        self._allocator.release(one.number)
        state.waiting.appendleft((one.number, known + 1))
        state.preemptions += 1
