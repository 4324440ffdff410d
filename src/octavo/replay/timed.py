"""A trace through the engine's own scheduler, block manager and radix tree, in virtual time.

The loop is the engine's (`core.engine_core`), the executor a simulated one. Memory holds what waits and runs, and
counts; requests are read when their time has come. It knows no file and prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from octavo.core.block_manager import BlockManager
from octavo.core.config import SchedulerConfig
from octavo.core.engine_core import EngineCore, RequestOutput
from octavo.core.eviction import EvictionPolicy
from octavo.core.kv_spec import KVSpec
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.status import CoreStatus
from octavo.errors import InvalidRequestError
from octavo.replay.cost_model import CostModel
from octavo.replay.quantiles import Quantiles
from octavo.replay.sim_executor import SimExecutor, VirtualClock
from octavo.replay.trace import TraceRequest
from octavo.replay.trace_tokens import prompt_tokens

MAX_SAMPLES = 512  # points of the occupancy over time
MAX_REASONS = 5


@dataclass(frozen=True, slots=True)
class TimedConfig:
    scheduler: SchedulerConfig
    spec: KVSpec
    num_blocks: int
    token_exact_hits: bool = True
    speed: float = 1.0  # of the arrivals: 2 brings twice as many requests a second
    may_coast: bool = True  # leave out rows about which nothing is decided (core.coasting): the same, sooner


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Where things stand at a time."""

    time_s: float
    used_blocks: int
    cached_blocks: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class TimedReport:
    requests: int  # that were answered
    refused: int
    refused_reasons: tuple[str, ...]
    duration_s: float  # from the first arrival to the last token
    ttft_s: Quantiles
    itl_s: Quantiles
    e2e_s: Quantiles
    queue_max: int
    queue_mean_s: float  # waiting, also after preemptions: requests that wait over time, by Little's law
    running_max: int
    status: CoreStatus
    occupancy: tuple[Occupancy, ...]
    cost: str

    @property
    def output_tokens_per_s(self) -> float:
        return self.status.generation_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.duration_s if self.duration_s else 0.0


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    arrival_s: float
    last_token_s: float = -1.0  # below 0: it has none


@dataclass(slots=True)
class _Samples:
    """Thinned out as they become many, so that their number stays bounded."""

    every_s: float = 0.0
    next_s: float = 0.0
    kept: list[Occupancy] = field(default_factory=list)

    def add(self, one: Occupancy) -> None:
        if one.time_s < self.next_s:
            return
        self.kept.append(one)
        if len(self.kept) >= MAX_SAMPLES:
            del self.kept[1::2]
            self.every_s = max(self.every_s * 2, (one.time_s - self.kept[0].time_s) / len(self.kept))
        self.next_s = one.time_s + self.every_s


class TimedReplay:
    """One trace on one machine. `core` is the engine's; listeners may be added before `run`."""

    def __init__(self, config: TimedConfig, cost: CostModel, policy: EvictionPolicy | None = None) -> None:
        self._config = config
        self._cost = cost
        self._clock = VirtualClock()
        self._executor = SimExecutor(cost, self._clock)
        self.blocks = BlockManager(
            config.spec,
            config.num_blocks,
            enable_prefix_caching=config.scheduler.enable_prefix_caching,
            token_exact_hits=config.token_exact_hits,
            policy=policy,
        )
        self._scheduler = Scheduler(config.scheduler, self.blocks, unheard=self if config.may_coast else None)
        self.core = EngineCore(self._scheduler, self._executor)
        self._open: dict[str, _Open] = {}
        self._num_read = self._num_done = self._refused = 0
        self._reasons: list[str] = []
        self._ttft, self._itl, self._e2e = Quantiles(), Quantiles(), Quantiles()
        self._queue_max = self._running_max = 0
        self._waited_s = 0.0
        self._samples = _Samples()

    def run(self, trace: Iterable[TraceRequest]) -> TimedReport:
        """All of the trace, in order; a request never arrives before the one above it."""
        clock, core = self._clock, self.core
        requests = iter(trace)
        coming = next(requests, None)
        start_s = last_s = None
        while coming is not None or core.has_work:
            if not core.has_work and coming is not None:
                clock.wait_until(coming.arrival_s / self._config.speed)
            if start_s is None:
                start_s = last_s = clock.now_s
            coming = self._take_arrived(coming, requests)
            if core.has_work:
                before_s = clock.now_s
                outputs = core.step()
                if self._executor.num_coasting:  # each of them had its last token when the step before was over
                    self._itl.add(clock.now_s - before_s, self._executor.num_coasting)
                for output in outputs:
                    self._hear(output)
                self._look(clock.now_s - (last_s if last_s is not None else clock.now_s))
                last_s = clock.now_s
        return TimedReport(
            self._num_done,
            self._refused,
            tuple(self._reasons),
            (last_s or 0.0) - (start_s or 0.0),
            self._ttft,
            self._itl,
            self._e2e,
            self._queue_max,
            self._waited_s / self._num_done if self._num_done else 0.0,
            self._running_max,
            core.status(),
            tuple(self._samples.kept),
            self._cost.name,
        )

    def _take_arrived(self, coming: TraceRequest | None, requests: Iterator[TraceRequest]) -> TraceRequest | None:
        """Add what has arrived by now. Returns the first that has not."""
        now, speed = self._clock.now_s, self._config.speed
        while coming is not None and coming.arrival_s / speed <= now:
            self._add(coming, coming.arrival_s / speed)
            coming = next(requests, None)
        return coming

    def _add(self, one: TraceRequest, arrival_s: float) -> None:
        name, number = f"r{self._num_read}", self._num_read
        self._num_read += 1
        params = SamplingParams(max_tokens=max(1, one.num_output_tokens), ignore_eos=True)
        try:
            tokens, space = prompt_tokens(one, number), one.namespace
            self.core.add(Request(name, tokens, params, seed=number, namespace=space, priority=one.priority))
        except InvalidRequestError as error:
            self._refused += 1
            if len(self._reasons) < MAX_REASONS:
                self._reasons.append(f"request {number}: {error}")
            return
        self._executor.tell(name, one.output_token_ids)
        self._open[name] = _Open(arrival_s)

    def _look(self, seconds: float) -> None:
        """After a step that took so long: how full it is, and who waits."""
        running = self._scheduler.num_running
        waiting = len(self._open) - running
        self._queue_max = max(self._queue_max, waiting)
        self._running_max = max(self._running_max, running)
        self._waited_s += waiting * seconds
        if self._clock.now_s >= self._samples.next_s:
            pool = self.blocks.pool
            used = pool.num_blocks - pool.num_available
            self._samples.add(Occupancy(self._clock.now_s, used, len(pool.idle), running, waiting))

    def drawn(self, request_id: str, position: int, count: int) -> Sequence[int]:
        """For the core: what a request drew in the steps that it coasted through, of which the last is just over."""
        self._open[request_id].last_token_s = self._clock.now_s
        return self._executor.drawn(request_id, position, count)

    def _hear(self, output: RequestOutput) -> None:
        one, now = self._open[output.request_id], self._clock.now_s
        if output.token is not None:
            if one.last_token_s < 0:
                self._ttft.add(now - one.arrival_s)
            else:
                self._itl.add(now - one.last_token_s)
            one.last_token_s = now
        if output.finish_reason is not None:
            self._e2e.add(now - one.arrival_s)
            self._num_done += 1
            del self._open[output.request_id]
            self._executor.forget(output.request_id)
