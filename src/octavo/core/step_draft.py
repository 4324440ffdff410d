"""A step while it is being decided: rows can still be taken back. It decides nothing itself."""

from __future__ import annotations

from octavo.core.block_manager import Copies
from octavo.core.request import Request
from octavo.core.step import BlockCopy, Row, StepPlan


class StepDraft:
    """Lives for one call of `Scheduler.schedule`."""

    __slots__ = ("_copies", "_rows", "budget", "preempted")

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens that may still be planned
        self.preempted: list[str] = []
        self._rows: dict[str, Row] = {}
        self._copies: list[BlockCopy] = []

    def add_row(self, request: Request, end: int) -> None:
        """Run the request's tokens from what is computed up to `end`; its tables cover them."""
        start = request.num_computed_tokens
        self._rows[request.request_id] = Row(
            request.request_id,
            start,
            tuple(request.token_ids[start:end]),
            tuple([table[:] for table in request.block_tables]),
            request.sample_spec() if end == len(request.token_ids) else None,
        )
        self.budget -= end - start

    def add_copies(self, copies: Copies) -> None:
        self._copies += copies

    def take_back(self, request: Request) -> None:
        """The request is preempted: its row, if there is one, does not run.

        Its copies stay in the plan. They do no harm: they run before any row, their targets were free before, and
        whoever is given such a target in this step copies later in the order, or writes before it reads.
        """
        self.preempted.append(request.request_id)
        row = self._rows.pop(request.request_id, None)
        if row is not None:
            self.budget += len(row.token_ids)

    def plan(self, step_index: int) -> StepPlan:
        return StepPlan(step_index, tuple(self._copies), tuple(self._rows.values()), tuple(self.preempted))
