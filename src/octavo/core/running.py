"""The requests that hold blocks, in their order: who starts, joins, is preempted, leaves. It decides none of it."""

from __future__ import annotations

from bisect import insort

from octavo.core import events
from octavo.core.admission import Admission
from octavo.core.block_manager import BlockManager, Copies
from octavo.core.branches import Branches
from octavo.core.prefix_match import NO_MATCH, PrefixMatch
from octavo.core.request import Request, RequestStatus
from octavo.core.status import Counters


class Running:
    """A branch is one of `requests` by itself; branches of a request stand together, and stop running together."""

    __slots__ = ("_admission", "_blocks", "_counters", "groups", "requests")

    def __init__(self, blocks: BlockManager, admission: Admission, counters: Counters) -> None:
        self._blocks = blocks
        self._admission = admission
        self._counters = counters
        # Invariant: in order; the only requests that hold blocks.
        self.requests: list[Request] = []
        self.groups: dict[str, Branches] = {}  # request id -> the branches of a request that runs

    @property
    def num_seats(self) -> int:
        """Seats that are taken: also by branches that are still to come."""
        coming = sum(group.num_seats - group.num_running for group in self.groups.values())
        return len(self.requests) + coming

    def start(self, request: Request, match: PrefixMatch) -> Copies:
        """Let a request run that waited, with what the cache has of it. Its other branches join, now or later."""
        copies = self._attach(request, match)
        group = request.group
        if group is None:
            return copies
        self.groups[group.request_id] = group
        for join in group.all_joins():
            parent = join.parent
            if parent.status is RequestStatus.RUNNING and join.at <= parent.num_computed_tokens:
                copies += self._attach(join.child, self._blocks.find_prefix(join.child))  # at least what they share
            else:
                join.child.status = RequestStatus.JOINING
                group.joins.append(join)
        return copies

    def join(self, parent: Request, child: Request) -> None:
        """The child runs as well, and holds what the parent has computed."""
        if parent.group is None or parent.group.shares_blocks:
            self._blocks.fork(parent, child)
        else:
            self._blocks.attach_prefix(child, NO_MATCH)
        child.num_accounted_tokens = max(child.num_accounted_tokens, parent.num_computed_tokens)
        if not child.is_counted:
            self._counters.enter(child, is_query=self._blocks.enable_prefix_caching)
            if child.group is not None:
                child.num_cached_tokens = parent.num_cached_tokens
        self._run(child)

    def preempt(self, request: Request) -> list[Request]:
        """The request waits again, with all its branches. Returns the branches that ran."""
        group = request.group
        branches = [request] if group is None else group.pause()
        if self._blocks.listeners:
            name = request.request_id if group is None else group.request_id
            self._blocks.tell(events.RequestPreempted(name, sum(branch.num_computed_tokens for branch in branches)))
        self._counters.preemptions += 1
        for branch in branches:
            self.leave(branch)
            branch.status = RequestStatus.WAITING
            branch.num_preemptions += 1
        if group is not None:
            del self.groups[group.request_id]
            request = group.open[0]
        self._admission.enter(request)
        return branches

    def leave(self, request: Request) -> None:
        self.requests.remove(request)
        self._blocks.release(request)
        self._admission.stopped(request)

    def is_last(self, request: Request) -> bool:
        """Whether nobody who runs comes behind this request and its branches."""
        last = self.requests[-1]
        return last is request or (last.group is not None and last.group is request.group)

    def _attach(self, request: Request, match: PrefixMatch) -> Copies:
        copies = self._blocks.attach_prefix(request, match)
        num_hit = self._counters.admit(request, is_query=self._blocks.enable_prefix_caching)
        if self._blocks.listeners:
            known, matched = len(request.token_ids), request.num_computed_tokens
            self._blocks.tell(events.RequestAdmitted(request.request_id, known, matched, num_hit))
        self._run(request)
        return copies

    def _run(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        insort(self.requests, request, key=lambda other: other.order)
        self._admission.advanced(request)
