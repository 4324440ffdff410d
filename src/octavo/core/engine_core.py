"""The one loop that the live engine and a replay share: schedule, execute, update.

It knows no model, clock or thread; one thread at a time may use it.
"""

from __future__ import annotations

from typing import Protocol

from octavo.core.events import Listener
from octavo.core.request import Request
from octavo.core.request_output import RequestOutput
from octavo.core.scheduler import Scheduler
from octavo.core.sharing import BranchMemory
from octavo.core.status import CoreStatus
from octavo.core.step import Executor, StepPlan, StepResult

__all__ = ["CoreStatus", "EngineCore", "Journal", "RequestOutput"]


class Journal(Protocol):
    """Hears all that comes into the core, in order: who does the same again with another core gets the same events.

    A call is heard before the core acts on it, but an `add` that was refused is not.
    """

    def added(self, request: Request) -> None: ...

    def ending(self, request_id: str, finish_reason: str, branch: int | None) -> None: ...

    def planned(self, plan: StepPlan) -> None:
        """A step was decided; without rows it is not carried out."""
        ...

    def executed(self, plan: StepPlan, result: StepResult) -> None:
        """What the executor did; the core takes it in now."""
        ...

    def failing(self, error: str) -> None: ...

    def resetting(self) -> None: ...


class EngineCore:
    """Requests go in by `add`; each gets its tokens, and exactly one final output, from `step`."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._journal: Journal | None = None

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
        if self._journal is not None:
            self._journal.added(request)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state, freeing its blocks now; its final output comes with the next step.

        False when there is no such request, or it has ended already.
        """
        if self._journal is not None:
            self._journal.ending(request_id, "abort", None)
        return self._scheduler.end(request_id, "abort")

    def finish(self, request_id: str, branch: int = 0) -> bool:
        """End one branch of a request as "stop": its text is complete. Otherwise as `abort`."""
        if self._journal is not None:
            self._journal.ending(request_id, "stop", branch)
        return self._scheduler.end(request_id, "stop", branch=branch)

    def step(self) -> list[RequestOutput]:
        """Decide, do, take in. What the executor raises comes through: then call `fail_all`, the step is half done."""
        journal = self._journal
        plan = self._scheduler.schedule()
        if journal is not None:
            journal.planned(plan)
        if plan.is_empty:
            return self._scheduler.take_ended()
        result = self._executor.execute(plan)
        if journal is not None:
            journal.executed(plan, result)
        return self._scheduler.take_ended() + self._scheduler.update(plan, result)

    def fail_all(self, error: str) -> list[RequestOutput]:
        """End every request with finish reason "error"; for the loop's owner, when a step raised."""
        if self._journal is not None:
            self._journal.failing(error)
        self._scheduler.end_all("error", error)
        return self._scheduler.take_ended()

    def status(self) -> CoreStatus:
        return self._scheduler.status()

    def branch_memory(self, request_id: str | None = None) -> tuple[BranchMemory, ...]:
        """What the branches of requests that have several hold now: of one such request, or of all."""
        return self._scheduler.branch_memory(request_id)

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no request holds; returns how many blocks that were."""
        if self._journal is not None:
            self._journal.resetting()
        return self._scheduler.blocks.reset_prefix_cache()

    def keep_journal(self, journal: Journal) -> None:
        """Tell `journal` of each call from now on; for a core that has not begun, and in which nobody coasts."""
        assert not self._scheduler.may_coast, "a journal needs every row"
        self._journal = journal

    @property
    def scheduler(self) -> Scheduler:
        """To look at: its config, its blocks. Whoever changes it answers for it."""
        return self._scheduler

    def add_listener(self, listener: Listener) -> None:
        """Call `listener` with each event from now on. Without listeners no event is made."""
        self._scheduler.blocks.listeners.append(listener)
