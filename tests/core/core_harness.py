"""Drives the core with the checking executor and holds it to everything that must be true after each step.

The shadow model is made from prompts, plans, events and outputs alone; only `structure_checks` looks inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

from octavo.core import events
from octavo.core.beam_search import Hypothesis
from octavo.core.block_manager import BlockManager
from octavo.core.config import SchedulerConfig
from octavo.core.engine_core import EngineCore, RequestOutput
from octavo.core.heavy_hitters import HeavyHitters
from octavo.core.keep_policy import KeepPolicy
from octavo.core.radix_node import GONE
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.seeds import branch_seed
from octavo.core.snap_kv import SnapKV
from octavo.core.step import StepPlan, StepResult
from octavo.core.streaming import StreamingLLM
from octavo.errors import CapacityError, InvalidRequestError
from octavo.testing.checking_executor import CheckingExecutor, extend_hash
from tests.core.group_windows import Windows, kv_spec, most_blocks
from tests.core.row_checks import check_drops, check_writer
from tests.core.shadow import VOCAB_SIZE, Shadow
from tests.core.structure_checks import check_structure, check_window_blocks


class Harness:
    def __init__(
        self,
        *,
        block_size: int = 4,
        num_blocks: int = 16,
        budget: int = 16,
        seats: int = 4,
        windows: Windows = (None,),
        prefix_caching: bool = True,
        kv_cache: bool = True,
        token_exact: bool = True,
        context: int = 10_000,
        more_alone: int = 0,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self.vocab_size = vocab_size
        self.spec, self.windows = kv_spec(block_size, windows), tuple(windows)
        self.blocks = BlockManager(self.spec, num_blocks * len(windows), token_exact_hits=token_exact)
        self.config = SchedulerConfig(
            seats, budget, context, prefix_caching, kv_cache, max_num_prefill_tokens=budget + more_alone
        )
        self.scheduler = Scheduler(self.config, self.blocks, vocab_size=vocab_size)
        self.executor = CheckingExecutor(block_size, vocab_size=vocab_size, windows=windows)
        self.core = EngineCore(self.scheduler, self)
        self.core.add_listener(self._hear)
        self.shadows: dict[str, Shadow] = {}
        self.unfinished: dict[str, None] = {}
        self.events: list[events.Event] = []
        self.resident: dict[int, tuple[int, bytes]] = {}  # block -> its group, namespace and tokens up to its end
        self.computed: set[tuple[str, int]] = set()  # namespace, hash of a prefix whose KV was computed in it
        self.num_plan_tokens = 0
        self.num_hit_tokens = 0
        self.num_preempted = 0
        self.num_answers = 0  # that are to come, or have come
        self.num_requests = 0

    # -- what a user does

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        priority: int = 0,
        namespace: str = "",
        eos: tuple[int, ...] = (),
        keep: KeepPolicy | None = None,
        **params: object,
    ) -> str | None:
        """Returns the request id, or None if it was refused because it can never fit."""
        request_id = self._new_id()
        sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        request = Request(
            request_id, prompt, sampling, seed=7, eos_token_ids=eos, namespace=namespace, priority=priority, keep=keep
        )
        stored = len(prompt) + max_tokens - 1
        fits = (
            sum(self._most(self._slots(stored, keep, len(prompt)))) <= self.blocks.pool.num_blocks
            and stored < self.config.max_model_len
        )
        try:
            self.core.add(request)
        except CapacityError:
            assert not fits, "a request was refused that fits"
            return None
        assert fits, "a request was accepted that can never fit"
        self._remember(request_id, Shadow(list(prompt), sampling, 7, eos, namespace, keep=keep))
        return request_id

    def add_branches(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        width: int,
        namespace: str = "",
        priority: int = 0,
        eos: tuple[int, ...] = (),
        **params: object,
    ) -> str | None:
        """A request with several branches: samples, or with `use_beam_search` a search of that width."""
        request_id = self._new_id()
        sampling = SamplingParams(max_tokens=max_tokens, best_of=width, **params)  # type: ignore[arg-type]
        request = Request(
            request_id, prompt, sampling, seed=7, eos_token_ids=eos, namespace=namespace, priority=priority
        )
        stored, size = len(prompt) + max_tokens - 1, self.spec.block_size
        shared = len(prompt) // size if self.config.enable_kv_cache else 0
        apart, common = -(-stored // size) - shared, [min(shared, most) for most in self._most(len(prompt))]
        needed = sum(min(c + width * min(apart, m), width * m) for c, m in zip(common, self._most(stored), strict=True))
        fits = needed <= self.blocks.pool.num_blocks and width <= self.config.max_num_seqs
        fits &= stored < self.config.max_model_len
        if sampling.use_beam_search:
            fits &= max(2, 1 + len(request.stop_token_ids)) * width <= self.vocab_size
        try:
            self.core.add(request)
        except InvalidRequestError:
            assert not fits, "a request was refused that fits"
            return None
        assert fits, "a request was accepted that can never fit"
        for branch in range(1 if sampling.use_beam_search else width):
            name = f"{request_id}#{branch}" if branch else request_id
            shadow = Shadow(list(prompt), sampling, branch_seed(7, branch), eos, namespace, is_branch=True)
            shadow.group, shadow.branch, shadow.width = request_id, branch, width
            self._remember(name, shadow)
        if sampling.use_beam_search:
            self.executor.forget(request_id)
            self.num_answers += sampling.n - 1
        return request_id

    def _most(self, num_tokens: int) -> list[int]:
        return most_blocks(self.windows, self.spec.block_size, num_tokens, self.config.max_num_batched_tokens)

    def _slots(self, num_tokens: int, keep: KeepPolicy | None, num_prompt: int) -> int:
        """The most slots of a text on its way to so many tokens, one after the other."""
        most = slots = 0
        for count in range(1, num_tokens + 1):
            slots += 1
            most = max(most, slots)
            match keep:
                case StreamingLLM() if slots == sum(self.whole(part) for part in astuple(keep)):
                    slots -= self.whole(keep.num_dropped_at_once)
                case SnapKV() if count == num_prompt:
                    slots = min(slots, keep.budget)
                case HeavyHitters() if slots == keep.budget + keep.piece:
                    slots = keep.budget
        return most

    def whole(self, num_tokens: int) -> int:
        return -(-num_tokens // self.spec.block_size) * self.spec.block_size

    def _new_id(self) -> str:
        self.num_requests += 1
        return f"r{self.num_requests - 1}"

    def fork(self, parent_id: str, max_tokens: int) -> str | None:
        """Branch a request that has not ended; the branch draws with another seed."""
        parent = self.shadows[parent_id]
        child_id = self._new_id()
        max_tokens = max(max_tokens, len(parent.output) + 1)
        params = SamplingParams(max_tokens=max_tokens)
        child = Request(child_id, parent.prompt, params, seed=len(self.shadows) + 100, namespace=parent.namespace)
        inherited = parent.inherited + parent.output[len(parent.inherited) :]
        try:
            self.scheduler.fork(parent_id, child)
        except CapacityError:
            return None
        shadow = Shadow(parent.prompt, params, child.seed, (), parent.namespace, True, inherited, list(inherited))
        shadow.keep = parent.keep
        self._remember(child_id, shadow)
        self.executor.expect(child_id, [*parent.prompt, *inherited])
        return child_id

    def _remember(self, request_id: str, shadow: Shadow) -> None:
        self.shadows[request_id] = shadow
        self.unfinished[request_id] = None
        self.num_answers += 1
        self.executor.expect(request_id, shadow.prompt)

    def step(self) -> list[RequestOutput]:
        first = self.scheduler.running[0].request_id.split("#")[0] if self.scheduler.running else None
        num_plans = len(self.executor.plans)
        outputs = self.core.step()
        if len(self.executor.plans) > num_plans and first in self._open_requests():
            ran = {row.request_id.split("#")[0] for row in self.executor.plans[-1].rows}
            assert first in ran, f"{first} comes first and made no progress"
        for output in outputs:
            self._take(output)
        self.check()
        return outputs

    def _open_requests(self) -> set[str]:
        return {name.split("#")[0] for name in self.unfinished}

    def end(self, request_id: str, *, as_stop: bool = False) -> None:
        """Abort a request, or finish it; of one that has samples, finish one."""
        shadow = self.shadows[request_id]
        name = shadow.group or request_id
        rows = [row for row in self.shadows if row.split("#")[0] == name]
        ended = [request_id] if as_stop else [row for row in rows if row in self.unfinished]

        def end() -> bool:
            return self.core.finish(name, shadow.branch) if as_stop else self.core.abort(name)

        was_open = request_id in self.unfinished if as_stop else bool(ended)
        assert end() is was_open
        assert not end(), "a request was ended twice"
        for row in rows:
            self.shadows[row].was_touched = True
        for row in ended if was_open else []:
            del self.unfinished[row]
        assert not was_open or self.core.has_work, "its final output would never be told"
        self.check()

    def drain(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, f"{list(self.unfinished)} have not ended after {max_steps} steps"
        assert not self.unfinished, f"{list(self.unfinished)} were forgotten"
        assert all(shadow.final is not None for shadow in self.shadows.values()), "a request has no final output"
        status = self.core.status()
        assert (status.used_blocks, status.running, status.waiting, status.internal_waste_tokens) == (0, 0, 0, 0)
        assert sum(status.finished.values()) == self.num_answers
        assert status.branch_saved_blocks == 0

    def empty(self) -> None:
        """Drain, and take everything that was counted as available."""
        self.drain()
        cached = self.core.status().cached_blocks
        assert self.core.reset_prefix_cache() == cached
        assert self.core.status().free_blocks == self.blocks.pool.num_blocks
        assert not self.resident
        assert self.blocks.tree.num_namespaces == 0

    # -- the executor's side and the outputs

    def execute(self, plan: StepPlan) -> StepResult:
        """Stands between core and executor."""
        alone = len(self.unfinished) == 1 and all(window is None for window in self.windows)
        most = self.config.most_step_tokens if alone else self.config.max_num_batched_tokens
        assert 0 < plan.num_tokens <= most
        assert len(plan.rows) <= self.config.max_num_seqs
        self._check_admissions()
        result = self.executor.execute(plan)
        self.num_plan_tokens += plan.num_tokens
        for row in plan.rows:
            check_writer(self, row)
            check_window_blocks(self, row.block_tables, row.start - row.dropped[1], len(row.token_ids))
            check_drops(self, row)
            if row.request_id in self.shadows:
                self.shadows[row.request_id].num_run += len(row.token_ids)
            shadow = self.shadows[row.request_id.split("#")[0]]
            text, prefix = self._text_of(row.request_id), 0
            for token in text[: row.start + len(row.token_ids)]:
                prefix = extend_hash(prefix, token)
                self.computed.add((shadow.namespace, prefix))
        self.num_preempted += len(plan.preempted)
        for name, shadow in self.shadows.items():
            shadow.preemptions += (shadow.group or name) in plan.preempted
        return result

    def _text_of(self, row_id: str) -> list[int]:
        """The tokens that a row's request has now. What a beam has only the core knows, until its search ends."""
        shadow = self.shadows.get(row_id)
        if shadow is None or shadow.params.use_beam_search:
            return next(
                request for request in self.scheduler.running if request.request_id == row_id
            ).token_ids.tolist()
        return [*shadow.prompt, *shadow.output]

    def _check_admissions(self) -> None:
        """What a request found in the cache was computed before this step, for its own namespace."""
        for event in reversed(self.events):
            if isinstance(event, events.StepStarted):
                return
            if isinstance(event, events.RequestAdmitted):
                shadow, prefix = self.shadows[event.request_id.split("#")[0]], 0
                text = self._text_of(event.request_id)
                assert event.num_matched_tokens < len(text), "the last token must run"
                for token in text[: event.num_matched_tokens]:
                    prefix = extend_hash(prefix, token)
                    assert (shadow.namespace, prefix) in self.computed, f"{event.request_id} hit what was not computed"

    def _take(self, output: RequestOutput) -> None:
        shadow = self.shadows[output.request_id]
        if shadow.params.use_beam_search:
            self._take_beam(shadow, output)
            return
        name = f"{output.request_id}#{output.branch}" if output.branch else output.request_id
        shadow = self.shadows[name]
        assert shadow.final is None, f"{output.request_id} got an output after its final one"
        if output.token is not None:
            shadow.output.append(output.token.token_id)
        assert output.num_output_tokens == len(shadow.output)
        assert output.num_prompt_tokens == len(shadow.prompt)
        assert output.num_cached_tokens < len(shadow.prompt) or shadow.is_branch
        if output.finish_reason is None:
            return
        shadow.final = output
        self.unfinished.pop(name, None)
        if shadow.group is not None:
            others = [row for row in self.shadows if row.split("#")[0] == shadow.group]
            assert output.open_branches == sum(self.shadows[row].final is None for row in others)
        text, reason = shadow.reference(self.vocab_size)
        if output.token is None:
            assert shadow.output == text[: len(shadow.output)], f"{output.request_id}: wrong text"
            assert (output.finish_reason == "error") is (output.error is not None)
            return
        assert (shadow.output, output.finish_reason) == (text, reason), f"{output.request_id}: wrong text or end"
        if (
            shadow.group is not None
            and not shadow.preemptions
            and not shadow.was_touched
            and self.config.enable_kv_cache
        ):
            stored = len(shadow.output) - 1 + (0 if shadow.branch else len(shadow.prompt) - output.num_cached_tokens)
            assert shadow.num_run == stored, f"{name}: the prompt was computed for a second branch"
        if not shadow.preemptions and not shadow.is_branch and self.config.enable_kv_cache:
            stored = len(shadow.prompt) + len(shadow.output) - 1
            assert output.num_cached_tokens + shadow.num_run == stored, f"{output.request_id}: its ledger is wrong"

    def _take_beam(self, shadow: Shadow, output: RequestOutput) -> None:
        assert output.finish_reason is not None, "a search tells something before its end"
        assert len(shadow.finals) == output.branch < shadow.params.n
        assert output.open_branches == shadow.params.n - 1 - output.branch
        shadow.finals.append(output)
        shadow.final = output
        self.unfinished.pop(output.request_id, None)
        if output.finish_reason in ("abort", "error") or not output.token_ids:
            assert output.token_ids == ()
            assert (output.finish_reason == "error") is (output.error is not None)
            return
        expected = shadow.reference_beams(self.vocab_size)[output.branch]
        found = Hypothesis(output.token_ids, output.score or 0.0, output.finish_reason)
        assert found == expected, f"{output.request_id}: another beam"

    def _hear(self, event: events.Event) -> None:
        self.events.append(event)
        if isinstance(event, events.BlocksCommitted):
            above = {self.resident[block][1] for block in event.parent_block_ids if block != GONE} or {
                event.namespace.encode() + b"|"
            }
            (path,) = above
            for place, block in enumerate((*event.twins, *event.blocks)):
                path += block.tokens
                assert GONE not in block.block_ids
                for group, block_id in enumerate(block.block_ids):
                    is_new = block_id not in self.resident
                    assert is_new or place < len(event.twins)
                    assert is_new or self.resident[block_id] == (group, path)
                    self.resident[block_id] = (group, path)
        elif isinstance(event, events.BlocksEvicted):
            for block_ids in event.blocks:
                for group, block_id in enumerate(block_ids):
                    assert block_id == GONE or self.resident.pop(block_id)[0] == group
        elif isinstance(event, events.RequestAdmitted):
            self.num_hit_tokens += event.num_hit_tokens

    # -- what must hold

    def check(self) -> None:
        self.check_ledger()
        self.check_structure()

    def check_structure(self) -> None:
        check_structure(self)

    def check_ledger(self) -> None:
        status = self.core.status()
        assert status.free_blocks + status.cached_blocks + status.used_blocks == status.num_blocks
        counted = status.computed_tokens + status.recomputed_tokens + status.failed_tokens
        assert counted == self.num_plan_tokens == self.executor.num_processed_tokens == status.processed_tokens
        assert status.hit_tokens == self.num_hit_tokens
        assert status.copies == self.executor.num_copies, "copies counted are not copies made"
        running = {request.request_id.split("#")[0] for request in self.scheduler.running}
        assert len(running) + status.waiting == len(self._open_requests())
        assert status.preemptions == self.num_preempted
        assert status.branch_saved_blocks == self._count_saved()
        assert status.hit_tokens <= status.queries_tokens

    def _count_saved(self) -> int:
        saved, names = 0, {r.group.request_id for r in self.scheduler.running if r.group is not None}
        for name in names:
            tables = [
                t for r in self.scheduler.running if r.group and r.group.request_id == name for t in r.block_tables
            ]
            held = [block for table in tables for block in table if block != GONE]
            saved += len(held) - len(set(held))
        return saved
