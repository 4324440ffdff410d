"""A step while it is being decided: how large it may be, and rows that can still be taken back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from octavo.core.block_manager import Copies
from octavo.core.config import SchedulerConfig
from octavo.core.request import Request
from octavo.core.step import BlockCopy, BranchSample, CoastingRows, Compaction, Row, StepPlan
from octavo.core.streaming import DropPlan
from octavo.core.windows import Windows


def step_tokens(config: SchedulerConfig, requests: Mapping[str, Request], windows: Windows) -> int:
    """How many tokens the next step may have: more than usual for a prompt that is alone, and holds up nobody.

    requests: all that have not ended. Not where larger steps take memory that room is not reckoned with: blocks behind
    windows, logits of all rows.
    """
    if len(requests) == 1 and not windows:
        (request,) = requests.values()
        if request.drops is None and request.group is None and request.params.prompt_logprobs is None:
            return config.most_step_tokens
    return config.max_num_batched_tokens


class StepDraft:
    """Lives for one call of `Scheduler.schedule`."""

    __slots__ = ("_compactions", "_copies", "_rows", "budget", "preempted")

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens that may still be planned
        self.preempted: list[str] = []
        self._rows: dict[str, Row] = {}
        self._copies: list[BlockCopy] = []
        self._compactions: list[Compaction] = []

    def add_row(self, request: Request, end: int) -> None:
        """Run the request's tokens from what is computed up to `end`; its tables cover them."""
        start, group = request.num_computed_tokens, request.group
        self._rows[request.request_id] = Row(
            request.request_id,
            start,
            tuple(request.token_ids[start:end]),
            tuple([table[:] for table in request.block_tables]),
            request.sample_spec() if end == len(request.token_ids) else None,
            ()
            if group is None
            else tuple([BranchSample(b.request_id, b.sample_spec()) for b in group.drawing(request, end)]),
            None if request.params.prompt_logprobs is None else request.prompt_scores(start, end),
            _dropped(request),
            None if request.kept is None else request.kept.weighing(start, end),
        )
        self.budget -= end - start

    def add_copies(self, copies: Copies) -> None:
        self._copies += copies

    def add_compaction(self, compaction: Compaction) -> None:
        self._compactions.append(replace(compaction, num_copies_before=len(self._copies)))

    def take_back(self, request_id: str, branches: Sequence[Request]) -> None:
        """The request is preempted: the rows of its branches, as far as there are any, do not run.

        Its copies and its compaction stay in the plan. They do no harm: they run before any row, their targets were
        free before, and whoever is given such a target in this step copies later, or writes before it reads.
        """
        self.preempted.append(request_id)
        for branch in branches:
            row = self._rows.pop(branch.request_id, None)
            if row is not None:
                self.budget += len(row.token_ids)

    def plan(self, step_index: int, coasting: CoastingRows) -> StepPlan:
        rows, moved = tuple(self._rows.values()), tuple(self._compactions)
        return StepPlan(step_index, tuple(self._copies), rows, tuple(self.preempted), coasting, moved)


def _dropped(request: Request) -> tuple[int, int]:
    if isinstance(request.drops, DropPlan):
        return request.drops.num_sinks, request.num_dropped_tokens
    return (-1, request.num_dropped_tokens) if request.num_dropped_tokens else (0, 0)
