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

Fairness (F15): between two tokens of a running request in decode lies one step, at most max_num_batched_tokens tokens,
whatever else arrives; more only if it is preempted or stands still for want of memory.
"""

from __future__ import annotations

from bisect import insort

from octavo.core import events
from octavo.core.admission import Admission
from octavo.core.block_manager import BlockManager
from octavo.core.config import SchedulerConfig
from octavo.core.prefix_match import PrefixMatch
from octavo.core.request import PRIORITY_STEP, Request, RequestStatus
from octavo.core.request_check import check_request
from octavo.core.request_output import RequestOutput, output_of
from octavo.core.status import CoreStatus, Counters, core_status
from octavo.core.step import SampledToken, StepPlan, StepResult
from octavo.core.step_draft import StepDraft
from octavo.errors import InvalidRequestError


class Scheduler:
    """Owns the requests that were added and have not ended."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, *, vocab_size: int | None = None) -> None:
        self.config = config
        self.blocks = blocks
        if not (config.enable_prefix_caching and config.enable_kv_cache):
            blocks.enable_prefix_caching = False
        self._vocab_size = vocab_size
        self._requests: dict[str, Request] = {}
        # Invariant: in order; the only requests that hold blocks.
        self._running: list[Request] = []
        self._admission = Admission(blocks)  # the requests that wait
        self._ended: list[RequestOutput] = []  # final outputs that no step has told yet
        self._num_arrivals = 0
        self._counters = Counters()

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._ended)

    def add(self, request: Request) -> None:
        """Queue a request. Raises CapacityError or InvalidRequestError; then nothing has changed."""
        self._register(request)
        self._admission.enter(request)

    def fork(self, parent_id: str, child: Request) -> None:
        """Queue a branch of `parent_id` between two steps: `child` gets the parent's tokens, and shares its blocks.

        If there is no room to run it at once, it waits like others and finds what the parent has committed.
        """
        parent = self._requests[parent_id]
        child.token_ids, child.num_prompt_tokens = parent.token_ids[:], parent.num_prompt_tokens
        self._register(child)
        may_share = parent.status is RequestStatus.RUNNING and self.config.enable_kv_cache
        if may_share and len(self._running) < self.config.max_num_seqs:
            self.blocks.fork(parent, child)
            child.num_accounted_tokens = parent.num_accounted_tokens
            self._counters.enter(child, is_query=self.blocks.enable_prefix_caching)
            self._run(child)
        else:
            self._admission.enter(child)

    def schedule(self) -> StepPlan:
        """Decide the next step. Every request that has not ended makes progress, waits or stands still (see above)."""
        counters = self._counters
        counters.steps += 1
        if self.blocks.listeners:
            self.blocks.tell(events.StepStarted(counters.steps))
        draft = StepDraft(self.config.max_num_batched_tokens)
        decoding: list[Request] = []
        filling: list[Request] = []
        for request in self._running:
            missing = len(request.token_ids) - request.num_computed_tokens
            (decoding if missing == 1 else filling).append(request)
        is_short = False
        for request in decoding + filling:
            if request.status is RequestStatus.RUNNING and draft.budget:
                is_short |= not self._plan_row(request, draft)
        if not is_short and not draft.preempted:
            self._admit(draft)
        plan = draft.plan(counters.steps)
        assert plan.rows or not self._requests, "no request makes progress"
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take in what the executor did. Only now can others hit the blocks that were computed."""
        outputs = []
        self._counters.processed += result.num_tokens
        for row in plan.rows:
            request = self._requests.get(row.request_id)
            num_tokens = len(row.token_ids)
            if request is None or request.status is not RequestStatus.RUNNING:  # ended while the step ran
                self._counters.computed += num_tokens
                continue
            error = result.failed.get(row.request_id)
            if error is not None:
                self._counters.failed += num_tokens
                outputs.append(self._finish(request, "error", error=error))
                continue
            self._counters.account(request, row.start, row.start + num_tokens)
            self._compute(request, num_tokens)
            if row.sample is not None:
                outputs.append(self._take_token(request, result.sampled[row.request_id]))
        return outputs

    def end(self, request_id: str, finish_reason: str, error: str | None = None) -> bool:
        """End a request in whatever state; its final output comes with `take_ended`. False: there is none such."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._ended.append(self._finish(request, finish_reason, error=error))
        return True

    def end_all(self, finish_reason: str, error: str | None = None) -> None:
        for request_id in list(self._requests):
            self.end(request_id, finish_reason, error)

    def take_ended(self) -> list[RequestOutput]:
        """Final outputs of requests that were ended from outside, each told once."""
        ended, self._ended = self._ended, []
        return ended

    def status(self) -> CoreStatus:
        return core_status(self._counters, self.blocks, self._running, len(self._admission))

    @property
    def running(self) -> tuple[Request, ...]:
        return tuple(self._running)

    def _plan_row(self, request: Request, draft: StepDraft) -> bool:
        """Give a running request a row. False: there is not even memory for one token, nor anyone to take it from."""
        end = min(len(request.token_ids), request.num_computed_tokens + draft.budget)
        copies = self.blocks.grow(request, end)
        while copies is None:
            reach = self.blocks.reach(request)
            if reach > request.num_computed_tokens:
                end = min(end, reach)
            elif self._running[-1] is request:
                return False
            else:
                self._preempt(self._running[-1], draft)
            copies = self.blocks.grow(request, end)
        draft.add_copies(copies)
        draft.add_row(request, end)
        return True

    def _admit(self, draft: StepDraft) -> None:
        """Start waiting requests, as far as budget, seats and memory go."""
        while draft.budget and len(self._running) < self.config.max_num_seqs:
            found = self._admission.next(self._running)
            if found is None:
                return
            self._start(*found, draft)

    def _start(self, request: Request, match: PrefixMatch, draft: StepDraft) -> None:
        draft.add_copies(self.blocks.attach_prefix(request, match))
        num_hit = self._counters.admit(request, is_query=self.blocks.enable_prefix_caching)
        if self.blocks.listeners:
            known, matched = len(request.token_ids), request.num_computed_tokens
            self.blocks.tell(events.RequestAdmitted(request.request_id, known, matched, num_hit))
        self._run(request)
        planned = self._plan_row(request, draft)
        assert planned, f"{request.request_id} was admitted without room"

    def _run(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        insort(self._running, request, key=lambda other: other.order)
        self._admission.advanced(request)

    def _compute(self, request: Request, num_tokens: int) -> None:
        """The request's next tokens are computed."""
        request.num_computed_tokens += num_tokens
        committed = request.num_committed_blocks
        self.blocks.commit(request)
        if request.num_committed_blocks != committed:
            self._admission.advanced(request)

    def _take_token(self, request: Request, token: SampledToken) -> RequestOutput:
        self._counters.generation += 1
        finish_reason = request.take_token(token.token_id, self.config.max_model_len)
        if finish_reason is not None:
            return self._finish(request, finish_reason, token=token)
        if not self.config.enable_kv_cache:
            request.num_computed_tokens = 0
        return output_of(request, token)

    def _preempt(self, request: Request, draft: StepDraft) -> None:
        if self.blocks.listeners:
            self.blocks.tell(events.RequestPreempted(request.request_id, request.num_computed_tokens))
        draft.take_back(request)
        self._counters.preemptions += 1
        request.num_preemptions += 1
        self._leave_running(request)
        request.status = RequestStatus.WAITING
        self._admission.enter(request)

    def _leave_running(self, request: Request) -> None:
        self._running.remove(request)
        self.blocks.release(request)
        self._admission.stopped(request)

    def _finish(
        self, request: Request, finish_reason: str, *, token: SampledToken | None = None, error: str | None = None
    ) -> RequestOutput:
        """End a request in whatever state, freeing what it holds."""
        was, request.status, request.finish_reason = request.status, RequestStatus.FINISHED, finish_reason
        if was is RequestStatus.RUNNING:
            self._leave_running(request)
        else:
            self._admission.leave(request)
        del self._requests[request.request_id]
        self._counters.finished[finish_reason] += 1
        output = output_of(request, token, error)
        if self.blocks.listeners:
            self.blocks.tell(events.RequestFinished(output, request.num_preemptions))
        return output

    def _register(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use by a request that has not ended")
        check_request(request, self.config, self.blocks.spec, self.blocks.pool.num_blocks, self._vocab_size)
        request.arrival = self._num_arrivals
        request.order = (request.arrival + request.priority * PRIORITY_STEP, request.arrival)
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        if self.blocks.listeners:
            about = (request.request_id, request.namespace, request.num_prompt_tokens, request.priority)
            self.blocks.tell(events.RequestAdded(*about))
