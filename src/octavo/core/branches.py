"""The branches of one request: which are open, which wait to join another, what a beam search has so far.

A branch that holds nothing yet joins another one at the position up to which their texts agree: there it takes over
what the other has computed. So a prompt is computed once, and what is computed again after a preemption is shared as it
was. It knows no order, no budget and no blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.core.beam_search import BeamRules, BeamSearch
from octavo.core.radix_node import GONE
from octavo.core.radix_tree import common_tokens
from octavo.core.request import Request, RequestStatus
from octavo.core.seeds import branch_seed
from octavo.core.sharing import BranchMemory, BranchTable, Sharing, count_blocks, num_shared
from octavo.core.step import TokenLogprob

NO_STOP = 2**62


@dataclass(frozen=True, slots=True)
class Join:
    """`child` holds nothing until `parent` has computed `at` tokens; so far their texts agree."""

    child: Request
    parent: Request
    at: int


class Branches:
    """Owned by the scheduler. `open` are the branches that have not ended; of a search the beams, best first."""

    __slots__ = (
        "candidates",
        "joins",
        "num_generated_tokens",
        "open",
        "request_id",
        "search",
        "shares_blocks",
        "sharing",
        "width",
    )

    def __init__(self, root: Request, *, shares_blocks: bool) -> None:
        """`root` becomes the first branch. `shares_blocks` False: each computes and keeps its text by itself."""
        params = root.params
        self.request_id = root.request_id
        self.width = params.num_branches
        self.shares_blocks = shares_blocks
        self.num_generated_tokens = 0
        self.sharing = Sharing()
        self.search: BeamSearch | None = None
        self.candidates: dict[str, Sequence[TokenLogprob]] = {}  # of the beams that have computed their last token
        # Invariant: a parent that runs has computed less than any of its children waits for.
        self.joins: list[Join] = []
        self.open = [root]
        root.group = self
        if params.use_beam_search:
            rules = BeamRules(
                self.width, params.max_tokens, root.stop_token_ids, params.length_penalty, params.early_stopping
            )
            self.search = BeamSearch(rules)
        else:
            if params.answers_at_end and params.logprobs is None:  # they are chosen by their log-probabilities
                root.params = replace(params, logprobs=0)
            self.open += [root.new_branch(i, branch_seed(root.seed, i)) for i in range(1, self.width)]

    @property
    def num_candidates(self) -> int:
        return 0 if self.search is None else self.search.rules.num_candidates

    @property
    def num_seats(self) -> int:
        """Requests that it counts as, when it runs."""
        return len(self.open) if self.search is None else self.width

    @property
    def num_running(self) -> int:
        return sum(branch.status is RequestStatus.RUNNING for branch in self.open)

    @property
    def num_answers(self) -> int:
        """Final outputs that are still to come."""
        return len(self.open) if self.search is None else self.open[0].params.n

    @property
    def has_all_candidates(self) -> bool:
        return len(self.candidates) == len(self.open)

    def all_joins(self) -> list[Join]:
        """Whom each branch but the first can join, as their texts are now: of those before it the one that agrees
        with it for longest, of equals the first. Hence who is joined has itself joined before it gets that far.
        """
        texts = [branch.token_ids.tobytes() for branch in self.open]
        joins = []
        for index, text in enumerate(texts[1:], 1):
            agreed = [common_tokens(text, other) for other in texts[:index]]
            joins.append(Join(self.open[index], self.open[agreed.index(max(agreed))], max(agreed)))
        return joins

    def stop_of(self, request: Request) -> int:
        """The position at which rows of a branch must end, as others join it there."""
        if not self.joins:
            return NO_STOP
        return min([join.at for join in self.joins if join.parent is request], default=NO_STOP)

    def drawing(self, request: Request, end: int) -> list[Request]:
        """Branches that draw from the logits of this one's position end - 1: they join there, with no token more."""
        if not self.joins:
            return []
        at_end = [join.child for join in self.joins if join.parent is request and join.at == end]
        return [child for child in at_end if len(child.token_ids) == end]

    def take_joining(self, request: Request) -> list[Request]:
        """Those that join this branch where it stands now."""
        if not self.joins:
            return []
        ready = [j.child for j in self.joins if j.parent is request and j.at == request.num_computed_tokens]
        self.joins = [join for join in self.joins if join.child not in ready]
        return ready

    def forget(self, request: Request) -> Request | None:
        """A branch has ended. Returns the one that takes over what it has computed, if others waited to join it."""
        self.open.remove(request)
        own = next((join for join in self.joins if join.child is request), None)
        behind = [join for join in self.joins if join.parent is request]
        self.joins = [join for join in self.joins if join.child is not request and join.parent is not request]
        if not behind:
            return None
        if own is not None:
            self.joins += [Join(join.child, own.parent, min(join.at, own.at)) for join in behind]
            return None
        heir = max(behind, key=lambda join: join.at)
        self.joins += [Join(join.child, heir.child, join.at) for join in behind if join is not heir]
        return heir.child

    def pause(self) -> list[Request]:
        """The request is preempted. Returns the branches that ran."""
        ran = [branch for branch in self.open if branch.status is RequestStatus.RUNNING]
        for branch in self.open:
            branch.status = RequestStatus.WAITING
        self.joins.clear()
        self.candidates.clear()
        return ran

    def measure(self) -> None:
        """Count what is shared now."""
        holding = [branch for branch in self.open if branch.block_tables]
        if not holding:
            self.sharing = replace(self.sharing, saved_blocks=0)
            return
        held = total = 0
        for group in range(len(holding[0].block_tables)):
            different, counted = count_blocks([branch.held_blocks(group) for branch in holding])
            held, total = held + different, total + counted
        saved, peak = total - held, self.sharing
        is_peak = saved > peak.peak_saved_blocks
        self.sharing = Sharing(saved, saved, held) if is_peak else replace(peak, saved_blocks=saved)

    def memory(self) -> BranchMemory:
        """What the branches hold now."""
        self.measure()
        first = [branch.block_tables[0] for branch in self.open if branch.block_tables]
        tables = tuple(
            BranchTable(
                branch.branch,
                branch.num_computed_tokens,
                tuple(tuple(table) for table in branch.block_tables),
                num_shared(branch.block_tables[0], [table for table in first if table is not branch.block_tables[0]])
                if branch.block_tables
                else 0,
            )
            for branch in self.open
        )
        blocks = len({block for table in tables for of_group in table.block_ids for block in of_group} - {GONE})
        return BranchMemory(self.request_id, tables, blocks, self.sharing)
