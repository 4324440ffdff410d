"""Takes in what the executor did: tokens, branches that join, searches that go on, ends. It plans nothing."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core import events
from octavo.core.admission import Admission
from octavo.core.beam_search import Hypothesis
from octavo.core.block_manager import BlockManager
from octavo.core.branches import Branches
from octavo.core.coasting import Coasting
from octavo.core.config import SchedulerConfig
from octavo.core.request import Request, RequestStatus
from octavo.core.request_output import RequestOutput, beam_outputs, output_of, with_scores
from octavo.core.running import Running
from octavo.core.status import Counters
from octavo.core.step import Row, SampledToken, StepPlan, StepResult


class Progress:
    """Owned by the scheduler. Every request gets one final output, or one for each of its branches."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        admission: Admission,
        running: Running,
        counters: Counters,
        coasting: Coasting,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._admission = admission
        self._running = running
        self._counters = counters
        self._coasting = coasting
        self.requests: dict[str, Request] = {}  # those that have not ended; each branch by itself
        self.groups: dict[str, Branches] = {}  # request id -> the branches of a request that has several
        self.peak_saved_blocks = 0
        self._ended: list[RequestOutput] = []  # final outputs that no step has told yet

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._ended)

    @property
    def saved_blocks(self) -> int:
        """Blocks that branches save now by sharing."""
        groups = self._running.groups.values()
        for group in groups:
            group.measure()
        return sum(group.sharing.saved_blocks for group in groups)

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take in what the executor did. Only now can others hit the blocks that were computed."""
        outputs: list[RequestOutput] = []
        self._counters.processed += result.num_tokens
        for row in plan.rows:
            request = self.requests.get(row.request_id)
            num_tokens = len(row.token_ids)
            if request is None or request.status is not RequestStatus.RUNNING:  # ended while the step ran
                self._counters.computed += num_tokens
                continue
            error = _error_of(row, result)
            if error is not None:
                self._counters.failed += num_tokens
                outputs += self._end_whole(request, "error", error)
                continue
            self._counters.account(request, row.start, row.start + num_tokens)
            if row.weighing is not None and request.kept is not None:
                request.kept.take(row.weighing, row.start + num_tokens, result.weighed.get(row.request_id))
            self._compute(request, num_tokens)
            if request.group is not None or row.prompt_scores is not None:
                outputs += self._take_branches(request, row, result)
            elif row.sample is not None:
                outputs.append(self._take_token(request, result.sampled[row.request_id]))
        if self._running.groups:
            self.peak_saved_blocks = max(self.peak_saved_blocks, self.saved_blocks)
        return outputs

    def end(self, request_id: str, finish_reason: str, error: str | None = None, branch: int | None = None) -> bool:
        """End a request, or one branch of it, in whatever state; `take_ended` tells it. False: there is none such."""
        group = self.groups.get(request_id)
        if group is None:
            request = None if branch else self.requests.get(request_id)
        else:
            found = [one for one in group.open if branch is None or one.branch == branch]
            request = found[0] if found else None
        if request is None:
            return False
        if branch is None or group is None or group.search is not None:
            self._ended += self._end_whole(request, finish_reason, error)
        else:
            self._ended.append(self._finish(request, finish_reason, error=error))
        return True

    def take_ended(self) -> list[RequestOutput]:
        """Final outputs of requests that were ended from outside, each told once."""
        ended, self._ended = self._ended, []
        return ended

    def _compute(self, request: Request, num_tokens: int) -> None:
        """The request's next tokens are computed: who waited for that joins it."""
        request.num_computed_tokens += num_tokens
        committed = request.num_committed_blocks
        self._blocks.commit(request)
        if request.num_committed_blocks != committed:
            self._admission.advanced(request)
        if request.group is not None:
            for child in request.group.take_joining(request):
                self._running.join(request, child)

    def _take_branches(self, request: Request, row: Row, result: StepResult) -> list[RequestOutput]:
        """What a row brought to its own branch and to those that draw from it, and about the prompt."""
        group, outputs = request.group, []
        drawing = [request] if row.sample is not None else []
        drawing += [self.requests[sample.request_id] for sample in row.branch_samples]
        if group is not None and group.search is not None:
            group.candidates.update({one.request_id: result.candidates[one.request_id] for one in drawing})
            if group.has_all_candidates:
                outputs = self._advance_search(group)
        else:
            outputs = [self._take_token(one, result.sampled[one.request_id]) for one in drawing]
        scores = result.prompt_scores.get(row.request_id, ()) if row.prompt_scores is not None else ()
        request.num_scored_tokens += len(scores)
        if scores:
            outputs[:1] = [with_scores(outputs[0] if outputs else output_of(request, None), scores)]
        return outputs

    def _take_token(self, request: Request, token: SampledToken) -> RequestOutput:
        self._counters.generation += 1
        if request.group is not None:
            request.group.num_generated_tokens += 1
        finish_reason = request.take_token(token.token_id, self._config.max_model_len)
        if finish_reason is not None:
            return self._finish(request, finish_reason, token=token)
        if not self._config.enable_kv_cache:
            self._blocks.restart(request)
        self._coasting.begin(request)
        return output_of(request, token)

    def _advance_search(self, group: Branches) -> list[RequestOutput]:
        """All beams have computed their last token: choose, let go of the dropped ones at once, fork the others."""
        search, beams = group.search, list(group.open)
        assert search is not None
        going_on = search.advance([group.candidates[beam.request_id] for beam in beams])
        group.candidates.clear()
        self._counters.generation += group.width
        group.num_generated_tokens += group.width
        if search.is_over:
            return self._end_search(group, "stop", search.best(beams[0].params.n))
        parents = {one.parent for one in going_on}
        for index, beam in enumerate(beams):
            if index not in parents:
                self._stop(beam, "stop")
        free = sorted(set(range(group.width)) - {beams[index].branch for index in parents}, reverse=True)
        group.open = []
        for one in going_on:
            beam = beams[one.parent]
            if one.parent in parents:
                parents.remove(one.parent)  # the first to go on from a beam is that beam
            else:
                beam = beam.new_branch(free.pop(), beam.seed)
                self.requests[beam.request_id] = beam
                self._running.join(beams[one.parent], beam)
            group.open.append(beam)
        for beam, one in zip(group.open, going_on, strict=True):
            beam.token_ids.append(one.token_id)
            if not self._config.enable_kv_cache:
                self._blocks.restart(beam)
        return []

    def _end_whole(self, request: Request, finish_reason: str, error: str | None) -> list[RequestOutput]:
        """End a request with all its branches."""
        group = request.group
        if group is None:
            return [self._finish(request, finish_reason, error=error)]
        group.joins.clear()
        if group.search is not None:
            return self._end_search(group, finish_reason, [], error)
        return [self._finish(branch, finish_reason, error=error) for branch in list(group.open)]

    def _end_search(
        self, group: Branches, finish_reason: str, found: list[Hypothesis], error: str | None = None
    ) -> list[RequestOutput]:
        beams = list(group.open)
        for beam in beams:
            self._stop(beam, finish_reason)
        outputs = beam_outputs(group, beams[0], found, error)
        self._tell_ends(outputs, beams[0])
        return outputs

    def _finish(
        self, request: Request, finish_reason: str, *, token: SampledToken | None = None, error: str | None = None
    ) -> RequestOutput:
        """End a request that has one branch, or one of its branches."""
        self._stop(request, finish_reason)
        output = output_of(request, token, error)
        self._tell_ends([output], request)
        return output

    def _stop(self, request: Request, finish_reason: str) -> None:
        """Take a branch out, in whatever state, freeing what it holds."""
        was, group = request.status, request.group
        request.status, request.finish_reason = RequestStatus.FINISHED, finish_reason
        waits_for_all = group is None or group.open[0] is request
        heir = group.forget(request) if group is not None else None
        if was is RequestStatus.RUNNING:
            if heir is not None:
                self._running.join(request, heir)
            self._running.leave(request)
        elif was is RequestStatus.WAITING and waits_for_all:
            self._admission.leave(request)
            if group is not None and group.open:
                self._admission.enter(group.open[0])
        del self.requests[request.request_id]

    def _tell_ends(self, outputs: Sequence[RequestOutput], request: Request) -> None:
        for output in outputs:
            assert output.finish_reason is not None
            self._counters.finished[output.finish_reason] += 1
            if not output.open_branches and request.group is not None:
                del self.groups[output.request_id]
                self._running.groups.pop(output.request_id, None)
            if self._blocks.listeners:
                self._blocks.tell(events.RequestFinished(output, request.num_preemptions))


def _error_of(row: Row, result: StepResult) -> str | None:
    if not result.failed:
        return None
    names = (row.request_id, *(sample.request_id for sample in row.branch_samples))
    return next((result.failed[name] for name in names if name in result.failed), None)
