"""How the engine is, in numbers: the core's status, answers and latencies. It does not know Prometheus or HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.status import CoreStatus
from octavo.engine.histogram import (
    BETWEEN_TOKENS_BOUNDS_S,
    FIRST_TOKEN_BOUNDS_S,
    WHOLE_REQUEST_BOUNDS_S,
    Histogram,
    HistogramSnapshot,
)
from octavo.engine.outputs import GenerationDelta


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """`state` is "running", "draining", "stopped" or "failed"; `reason` says why it is not running.

    `finished` counts final answers by their reason, `refused` requests never admitted. Tokens are counted in `core`.
    """

    state: str
    reason: str | None
    core: CoreStatus
    finished: tuple[tuple[str, int], ...]
    refused: int
    time_to_first_token_s: HistogramSnapshot
    inter_token_latency_s: HistogramSnapshot
    e2e_request_latency_s: HistogramSnapshot


class EngineMeter:
    """Counts what leaves the engine. Owned by the engine's thread; it only hears, and never touches a request."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._refused = 0
        self._first_token = Histogram(FIRST_TOKEN_BOUNDS_S)
        self._between_tokens = Histogram(BETWEEN_TOKENS_BOUNDS_S)
        self._whole_request = Histogram(WHOLE_REQUEST_BOUNDS_S)

    def now(self) -> float:
        return self._clock()

    def refused(self) -> None:
        self._refused += 1

    def first_token(self, waited_s: float) -> None:
        self._first_token.observe(waited_s)

    def next_token(self, waited_s: float) -> None:
        self._between_tokens.observe(waited_s)

    def finished(self, last: GenerationDelta, took_s: float) -> None:
        assert last.finish_reason is not None
        self._finished[last.finish_reason] += 1
        self._whole_request.observe(took_s)

    def status(self, state: str, reason: str | None, core: CoreStatus) -> EngineStatus:
        return EngineStatus(
            state=state,
            reason=reason,
            core=core,
            finished=tuple(self._finished.items()),
            refused=self._refused,
            time_to_first_token_s=self._first_token.snapshot(),
            inter_token_latency_s=self._between_tokens.snapshot(),
            e2e_request_latency_s=self._whole_request.snapshot(),
        )
