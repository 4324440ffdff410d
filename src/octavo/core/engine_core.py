"""The one loop that the live engine and a replay share: schedule, execute, update.

It knows no model, clock or thread; one thread at a time may use it.
"""

from __future__ import annotations

from octavo.core.events import Listener
from octavo.core.request import Request
from octavo.core.request_output import RequestOutput
from octavo.core.scheduler import Scheduler
from octavo.core.sharing import BranchMemory
from octavo.core.status import CoreStatus
from octavo.core.step import Executor

__all__ = ["CoreStatus", "EngineCore", "RequestOutput"]


class EngineCore:
    """Requests go in by `add`; each gets its tokens, and exactly one final output, from `step`."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self._scheduler = scheduler
        self._executor = executor

    @property
    def has_work(self) -> bool:
        """Whether another step would do or tell anything."""
        return self._scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises CapacityError, with the arithmetic, for one that can never fit the context or the pool, and
        InvalidRequestError for a request id that is in use or a token id outside the vocabulary.
        """
        self._scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state, freeing its blocks now; its final output comes with the next step.

        False when there is no such request, or it has ended already.
        """
        return self._scheduler.end(request_id, "abort")

    def finish(self, request_id: str, branch: int = 0) -> bool:
        """End one branch of a request as "stop": its text is complete. Otherwise as `abort`."""
        return self._scheduler.end(request_id, "stop", branch=branch)

    def step(self) -> list[RequestOutput]:
        """Decide, do, take in. What the executor raises comes through: then call `fail_all`, the step is half done."""
        plan = self._scheduler.schedule()
        if not plan.rows:
            return self._scheduler.take_ended()
        result = self._executor.execute(plan)
        return self._scheduler.take_ended() + self._scheduler.update(plan, result)

    def fail_all(self, error: str) -> list[RequestOutput]:
        """End every request with finish reason "error"; for the loop's owner, when a step raised."""
        self._scheduler.end_all("error", error)
        return self._scheduler.take_ended()

    def status(self) -> CoreStatus:
        return self._scheduler.status()

    def branch_memory(self, request_id: str | None = None) -> tuple[BranchMemory, ...]:
        """What the branches of requests that have several hold now: of one such request, or of all."""
        return self._scheduler.branch_memory(request_id)

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no request holds; returns how many blocks that were."""
        return self._scheduler.blocks.reset_prefix_cache()

    def add_listener(self, listener: Listener) -> None:
        """Call `listener` with each event from now on. Without listeners no event is made."""
        self._scheduler.blocks.listeners.append(listener)
