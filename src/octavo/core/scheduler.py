"""Which tokens of which requests run next. It decides; it never computes, waits or reads a clock.

Requests stand in one order: arrival, a level of priority counting as a head start of PRIORITY_STEP arrivals. A step
takes running requests that need one token (decode), then running ones that need more (prefill, in chunks of what the
token budget leaves), then waiting ones, each in order. Memory goes by the same order: who cannot get a block for its
next token preempts the last running request behind it, and makes no progress in this step if there is none behind.

Why every request ends (law 6). Only finitely many requests ever come before a given one, as each later arrival counts
one more. Look at the first of all that have not ended.
- If it runs, it gets a row of at least one token in every step: decode rows of the others leave at least one token of
  the budget (max_num_batched_tokens >= max_num_seqs), and it may preempt all others until it has its block, which must
  suffice since `add` refused what does not fit alone in the pool. Nobody can preempt it. So it ends.
- If it waits, it is not waiting for a prefix (only for requests before it), so it is the head of the queue and nobody
  is admitted past it. The running requests therefore only get fewer, the first of them ending as above, until the head
  is admitted: at the latest when nothing runs, as all blocks are available then.
By induction over the order all end. A preempted request loses what it had not committed; it is preempted only by those
before it, and admitted again only when all of its known tokens fit beside what runs, with a block to spare for each
running request: so the two do not take each other's memory in turn.

A request with several branches is one in this argument: it starts when all its branches have seats and room, its
branches stand together in the order, are preempted together, and do not take memory from each other; `add` refused it
unless all fit alone at their longest. Its branches that only join later wait for one that runs; a search waits until
all its beams have run, and each of them has a row until it has.

Fairness (F15): between two tokens of a running request in decode lies one step, at most max_num_batched_tokens tokens,
whatever else arrives; more only if it is preempted or stands still for want of memory. Steps of a prompt that is alone
have more tokens: they hold up nobody.
"""

from __future__ import annotations

from octavo.core import events
from octavo.core.admission import Admission
from octavo.core.block_manager import BlockManager
from octavo.core.branches import Branches
from octavo.core.coasting import Coasting, TokenSource
from octavo.core.compact import compact, is_due
from octavo.core.config import SchedulerConfig
from octavo.core.keep_policy import parse_policy
from octavo.core.kept import Kept
from octavo.core.progress import Progress
from octavo.core.request import PRIORITY_STEP, Request, RequestStatus
from octavo.core.request_check import check_request
from octavo.core.request_output import RequestOutput
from octavo.core.room import Room
from octavo.core.running import Running
from octavo.core.selection import SelectionPlan
from octavo.core.sharing import BranchMemory
from octavo.core.status import CoreStatus, Counters, core_status
from octavo.core.step import StepPlan, StepResult
from octavo.core.step_draft import StepDraft, step_tokens
from octavo.errors import InvalidRequestError


class Scheduler:
    """Owns the requests that were added and have not ended."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        *,
        vocab_size: int | None = None,
        unheard: TokenSource | None = None,
    ) -> None:
        """`unheard`: nobody wants to hear every token, and it knows them afterwards; then requests coast."""
        self.config = config
        self.blocks = blocks
        if not (config.enable_prefix_caching and config.enable_kv_cache):
            blocks.enable_prefix_caching = False
        self._vocab_size = vocab_size
        self._keep = parse_policy(config.kv_policy)
        self._num_arrivals = 0
        self._counters = Counters()
        self._admission = Admission(blocks, Room(blocks, config.max_num_batched_tokens))  # the requests that wait
        self._running = Running(blocks, self._admission, self._counters)
        self._coasting = Coasting(config, blocks.block_size, self._counters, unheard)
        self._progress = Progress(config, blocks, self._admission, self._running, self._counters, self._coasting)

    @property
    def has_work(self) -> bool:
        return self._progress.has_work

    @property
    def running(self) -> tuple[Request, ...]:
        self._coasting.catch_up_all(self._running.requests)
        return tuple(self._running.requests)

    @property
    def num_running(self) -> int:
        return len(self._running.requests)

    @property
    def may_coast(self) -> bool:
        """Whether a plan may leave out the rows of requests that coast."""
        return self._coasting.is_on

    def add(self, request: Request) -> None:
        """Queue a request. Raises CapacityError or InvalidRequestError; then nothing has changed."""
        self._register(request)
        if request.params.num_branches > 1 or request.params.use_beam_search:
            group = Branches(request, shares_blocks=self.config.enable_kv_cache)
            self._progress.groups[request.request_id] = group
            self._progress.requests.update({branch.request_id: branch for branch in group.open})
        self._admission.enter(request)

    def fork(self, parent_id: str, child: Request) -> None:
        """Queue a request that begins as `parent_id` did, between two steps: it gets the parent's tokens, and shares
        its blocks. If there is no room to run it at once, it waits and finds what the parent has committed.
        """
        parent = self._progress.requests[parent_id]
        self._coasting.wake(parent)
        child.token_ids, child.num_prompt_tokens = parent.token_ids[:], parent.num_prompt_tokens
        child.keep = parent.keep
        self._register(child)
        keeps_all = parent.drops is None and child.drops is None
        may_share = keeps_all and parent.status is RequestStatus.RUNNING and self.config.enable_kv_cache
        has_seat = self._running.num_seats < self.config.max_num_seqs
        self._running.join(parent, child) if may_share and has_seat else self._admission.enter(child)

    def schedule(self) -> StepPlan:
        """Decide the next step. Every request that has not ended makes progress, waits or stands still (see above)."""
        counters, coasting = self._counters, self._coasting
        counters.steps += 1
        if self.blocks.listeners:
            self.blocks.tell(events.StepStarted(counters.steps))
        decoding: list[Request] = []
        filling: list[Request] = []
        for request in self._running.requests:
            if request.coasts_until and not coasting.wake_if_due(request):
                continue
            missing = len(request.token_ids) - request.num_computed_tokens
            if missing:  # else a beam that waits for the others
                (decoding if missing == 1 else filling).append(request)
        draft = StepDraft(step_tokens(self.config, self._progress.requests, self.blocks.windows) - coasting.num)
        is_short = False
        for request in decoding + filling:
            if request.status is RequestStatus.RUNNING and draft.budget:
                is_short |= not self._plan_row(request, draft)
        if not is_short and not draft.preempted:
            self._admit(draft)
        plan = draft.plan(counters.steps, coasting.rows())
        assert not plan.is_empty or not self._progress.requests, "no request makes progress"
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take in what the executor did. Only now can others hit the blocks that were computed."""
        self._coasting.step_taken()
        return self._progress.update(plan, result)

    def end(self, request_id: str, finish_reason: str, error: str | None = None, branch: int | None = None) -> bool:
        """End a request, or one branch of it, in whatever state; `take_ended` tells it. False: there is none such."""
        if request_id in self._progress.requests:
            self._coasting.wake(self._progress.requests[request_id])
        return self._progress.end(request_id, finish_reason, error, branch)

    def end_all(self, finish_reason: str, error: str | None = None) -> None:
        for request_id in [*self._progress.groups, *self._progress.requests]:
            self.end(request_id, finish_reason, error)

    def take_ended(self) -> list[RequestOutput]:
        """Final outputs of requests that were ended from outside, each told once."""
        return self._progress.take_ended()

    def status(self) -> CoreStatus:
        self._coasting.catch_up_all(self._running.requests)
        waiting, saved = len(self._admission), (self._progress.saved_blocks, self._progress.peak_saved_blocks)
        return core_status(self._counters, self.blocks, self._running.requests, waiting, saved)

    def branch_memory(self, request_id: str | None = None) -> tuple[BranchMemory, ...]:
        """What requests with several branches hold now: all that have not ended, or one."""
        groups = self._progress.groups
        return tuple(group.memory() for name, group in groups.items() if request_id in (None, name))

    def _plan_row(self, request: Request, draft: StepDraft) -> bool:
        """Give a running request a row. False: there is not even memory for one token, nor anyone to take it from."""
        if not self._compact(request, draft):
            return False
        end = min(len(request.token_ids), request.num_computed_tokens + draft.budget)
        if request.group is not None:
            end = min(end, request.group.stop_of(request))
        drop = None if request.drops is None else request.drops.next_drop(request.num_computed_tokens)
        if drop is not None:
            end = min(end, drop)
        copies = self.blocks.grow(request, end)
        while copies is None:
            reach = self.blocks.reach(request)
            if reach > request.num_computed_tokens:
                end = min(end, reach)
            elif self._running.is_last(request):
                return False
            else:
                self._preempt(self._running.requests[-1], draft)
            copies = self.blocks.grow(request, end)
        draft.add_copies(copies)
        draft.add_row(request, end)
        return True

    def _compact(self, request: Request, draft: StepDraft) -> bool:
        """Let a request drop what it must before it goes on. False: there is no memory for what it keeps."""
        while is_due(request):
            compaction = compact(self.blocks, request)
            if compaction is not None:
                draft.add_compaction(compaction)
            elif self._running.is_last(request):
                return False
            else:
                self._preempt(self._running.requests[-1], draft)
        return True

    def _admit(self, draft: StepDraft) -> None:
        """Start waiting requests, as far as budget, seats and memory go."""
        running = self._running
        while draft.budget and (seats := self.config.max_num_seqs - running.num_seats) > 0:
            found = self._admission.next(running.requests, running.groups.values(), seats)
            if found is None:
                return
            request, match = found
            draft.add_copies(running.start(request, match))
            planned = self._plan_row(request, draft)
            assert planned, f"{request.request_id} was admitted without room"

    def _preempt(self, request: Request, draft: StepDraft) -> None:
        if request.coasts_until:
            self._coasting.wake(request)
            draft.budget += 1
        name = request.request_id if request.group is None else request.group.request_id
        draft.take_back(name, self._running.preempt(request))

    def _register(self, request: Request) -> None:
        params, requests = request.params, self._progress.requests
        branches = [f"{request.request_id}#{branch}" for branch in range(1, params.num_branches)]
        if request.request_id in self._progress.groups or any(n in requests for n in (request.request_id, *branches)):
            raise InvalidRequestError(f"request id {request.request_id!r} is in use by a request that has not ended")
        if request.keep is None:
            asked = request.params.kv_policy
            request.keep = self._keep if asked is None else parse_policy(asked)
        if request.keep is not None:
            most = request.num_prompt_tokens + params.max_tokens - 1  # the last token is never run
            request.drops = request.keep.plan(self.blocks.block_size, request.num_prompt_tokens, most)
        if isinstance(request.drops, SelectionPlan):
            request.kept = Kept(request.drops)
        check_request(request, self.config, self.blocks.spec, self.blocks.pool.num_blocks, self._vocab_size)
        request.arrival = self._num_arrivals
        request.order = (request.arrival + request.priority * PRIORITY_STEP, request.arrival, 0)
        self._num_arrivals += 1
        requests[request.request_id] = request
        if self.blocks.listeners:
            about = (request.request_id, request.namespace, request.num_prompt_tokens, request.priority)
            self.blocks.tell(events.RequestAdded(*about))
