"""Drives the core with the checking executor and holds it to everything that must be true after each step.

The shadow model is made from what comes in and goes out alone: prompts, plans, events, outputs. Only
`check_structure` looks inside.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

from octavo.core import events
from octavo.core.beam_search import BeamRules, BeamSearch, Hypothesis
from octavo.core.block_manager import BlockManager
from octavo.core.config import SchedulerConfig
from octavo.core.engine_core import EngineCore, RequestOutput
from octavo.core.heavy_hitters import HeavyHitters
from octavo.core.keep_policy import KeepPolicy
from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.core.radix_node import GONE, Node
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.seeds import branch_seed
from octavo.core.snap_kv import SnapKV
from octavo.core.step import Row, SampleSpec, StepPlan, StepResult
from octavo.core.streaming import StreamingLLM
from octavo.errors import CapacityError, InvalidRequestError
from octavo.testing.checking_executor import CheckingExecutor, candidates_of, extend_hash, hash_of, sample_token

VOCAB_SIZE = 3


Windows = Sequence[int | None]  # of each KV group; None: all tokens are kept; 0: those of the block that fills (a tail)


def kv_spec(block_size: int, windows: Windows = (None,)) -> KVSpec:
    pairs = [KVGroupSpec(f"group{g}", (g,), 1, 16, "bf16", window=one) for g, one in enumerate(windows) if one != 0]
    tail = KVGroupSpec("tail", (0,), 1, 16, "bf16", window=16, kind="tail", padding_bytes_per_token=32)
    groups = iter(pairs)
    return KVSpec(tuple(tail if one == 0 else next(groups) for one in windows), block_size)


def blocks_behind(window: int, block_size: int) -> int:
    """Full blocks that a window keeps: those of the window - 1 tokens before a block's edge; at least one; 0: none."""
    if not window:
        return 0
    return max(1, len({(10**6 * block_size - back) // block_size for back in range(1, window)}))


def most_blocks(windows: Windows, block_size: int, num_tokens: int, budget: int) -> list[int]:
    """The most blocks that a text of so many tokens needs in each group."""
    covering, step = -(-num_tokens // block_size), -(-(block_size - 1 + budget) // block_size)
    return [covering if one is None else min(covering, blocks_behind(one, block_size) + step) for one in windows]


@dataclass
class Shadow:
    """What the outside knows of one request."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    eos: tuple[int, ...]
    namespace: str
    is_branch: bool = False
    inherited: list[int] = field(default_factory=list)  # output tokens that a branch starts with
    output: list[int] = field(default_factory=list)
    final: RequestOutput | None = None
    preemptions: int = 0
    num_run: int = 0  # tokens of its rows
    group: str | None = None  # the request that it is a branch of, where that has several
    branch: int = 0
    width: int = 1
    was_touched: bool = False  # a branch of its request was ended from outside
    finals: list[RequestOutput] = field(default_factory=list)  # of a beam search
    keep: KeepPolicy | None = None
    num_weighed: int | None = None  # positions whose queries are counted; None: none yet
    chosen_at: set[int] = field(default_factory=set)  # computed tokens at which it was chosen what stays

    def reference_beams(self, vocab_size: int) -> list[Hypothesis]:
        """What a search gives that has no cache, no batch and no limits."""
        ending = frozenset(self.params.stop_token_ids) | (frozenset() if self.params.ignore_eos else set(self.eos))
        search = BeamSearch(
            BeamRules(
                self.width, self.params.max_tokens, ending, self.params.length_penalty, self.params.early_stopping
            )
        )
        beams = [list(self.prompt)]
        while not search.is_over:
            banned = tuple(sorted(ending)) if len(beams[0]) - len(self.prompt) < self.params.min_tokens else ()
            spec = SampleSpec(self.params, 0, 0, banned)
            found = [candidates_of(hash_of(beam), spec, vocab_size)[: search.rules.num_candidates] for beam in beams]
            beams = [[*beams[one.parent], one.token_id] for one in search.advance(found)]
        return search.best(self.params.n)

    def reference(self, vocab_size: int = VOCAB_SIZE) -> tuple[list[int], str]:
        """Output and finish reason that an engine without a cache, a batch or a limit gives."""
        params, output, prefix = self.params, list(self.inherited), 0
        ending = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.eos))
        for token in (*self.prompt, *output):
            prefix = extend_hash(prefix, token)
        while True:
            banned = tuple(sorted(ending)) if len(output) < params.min_tokens else ()
            token = sample_token(prefix, SampleSpec(params, self.seed, len(output), banned), vocab_size)
            output.append(token)
            prefix = extend_hash(prefix, token)
            if token in ending and len(output) > params.min_tokens:
                return output, "stop"
            if len(output) >= params.max_tokens:
                return output, "length"


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
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self.vocab_size = vocab_size
        self.spec, self.windows = kv_spec(block_size, windows), tuple(windows)
        self.blocks = BlockManager(self.spec, num_blocks * len(windows), token_exact_hits=token_exact)
        self.config = SchedulerConfig(seats, budget, context, prefix_caching, kv_cache)
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
                case StreamingLLM() if slots == sum(self._whole(part) for part in astuple(keep)):
                    slots -= self._whole(keep.num_dropped_at_once)
                case SnapKV() if count == num_prompt:
                    slots = min(slots, keep.budget)
                case HeavyHitters() if slots == keep.budget + keep.piece:
                    slots = keep.budget
        return most

    def _whole(self, num_tokens: int) -> int:
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
        assert 0 < plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(plan.rows) <= self.config.max_num_seqs
        self._check_admissions()
        result = self.executor.execute(plan)
        self.num_plan_tokens += plan.num_tokens
        for row in plan.rows:
            self._check_writer(row)
            self._check_window_blocks(row.block_tables, row.start - row.dropped[1], len(row.token_ids))
            self._check_drops(row)
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

    def _check_writer(self, row: Row) -> None:
        """Blocks that are written are held by their writer alone, and nobody can hit them."""
        size, indexed = self.spec.block_size, self._indexed()
        for table in row.block_tables:
            start = row.start - row.dropped[1]
            for block in table[start // size : -(-(start + len(row.token_ids)) // size)]:
                assert self.blocks.pool.ref_count[block] == 1, f"{row.request_id} writes block {block} that others hold"
                assert block not in indexed, f"{row.request_id} writes block {block} that can be hit"

    def _check_drops(self, row: Row) -> None:
        """At fixed places of the text, whatever the steps are: every token of the row reads the same."""
        shadow = self.shadows.get(row.request_id)
        keep = shadow.keep if shadow is not None else None
        if keep is None:
            assert row.dropped == (0, 0)
            return
        if not isinstance(keep, StreamingLLM):
            assert shadow is not None
            self._check_choices(row, shadow, keep)
            return
        sinks, recent, piece = (self._whole(part) for part in astuple(keep))
        gone = {
            max(0, (position - sinks - recent) // piece) * piece
            for position in range(row.start, row.start + len(row.token_ids))
        }
        assert {row.dropped} == {(sinks, count) for count in gone}
        assert all(len(table) * self.spec.block_size <= sinks + recent + piece for table in row.block_tables)

    def _check_choices(self, row: Row, shadow: Shadow, keep: KeepPolicy) -> None:
        """As `_check_drops`; and every query counts once, every choice is made once, whatever is computed again."""
        gone, num_prompt, end = set[int](), len(shadow.prompt), row.start + len(row.token_ids)
        if isinstance(keep, SnapKV):
            first, is_drop = num_prompt - keep.window, end == num_prompt > keep.budget
            for position in range(row.start, end):
                gone.add(max(0, num_prompt - keep.budget) if position >= num_prompt else 0)
        else:
            assert isinstance(keep, HeavyHitters)
            held = keep.budget + keep.piece
            first, is_drop = 0, end >= held and (end - held) % keep.piece == 0
            for position in range(row.start, end):
                gone.add(0 if position < held else (position - held) // keep.piece * keep.piece + keep.piece)
        (count,) = gone
        assert row.dropped == ((-1, count) if count else (0, 0))
        if row.weighing is None:
            assert not is_drop or end in shadow.chosen_at or num_prompt + shadow.params.max_tokens - 1 <= end
            return
        begin = row.start + row.weighing.first
        assert begin == (first if shadow.num_weighed is None else shadow.num_weighed), "queries count once each"
        assert bool(row.weighing.mass) is (shadow.num_weighed is not None), "what was counted before is lost"
        shadow.num_weighed = end
        assert (row.weighing.choice is not None) is is_drop
        if is_drop:
            assert end not in shadow.chosen_at, "it was chosen before what stays"
            shadow.chosen_at.add(end)

    def _indexed(self) -> set[int]:
        return {block for node in self.blocks.tree.nodes() for block in node.block_ids if block != GONE}

    def _check_window_blocks(self, tables: Sequence[Sequence[int]], start: int, num_tokens: int) -> None:
        """Between steps (0 tokens) a window and one block more at most, during a step its tokens more: to the block."""
        size = self.spec.block_size
        for table, window in zip(tables, self.windows, strict=True):
            first = 0 if window is None else max(0, start // size - blocks_behind(window, size))
            assert [block == GONE for block in table] == [index < first for index in range(len(table))]
            if self.config.enable_kv_cache:
                assert len(table) <= -(-(start + num_tokens) // size), "blocks beyond the text are held"
            held = len(table) - first
            bound = None if window is None else -(-window // size) + -(-num_tokens // size) + 1
            assert bound is None or held <= bound, "a window holds too much"

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

    def check_structure(self) -> None:
        pool, tree, running = self.blocks.pool, self.blocks.tree, self.scheduler.running
        held = Counter(block for r in running for table in r.block_tables for block in table if block != GONE)
        assert [held[block] for block in range(pool.num_blocks)] == pool.ref_count, "references are not holders"
        free, idle = list(pool.free_block_ids), list(pool.idle)
        assert sorted([*free, *idle, *held]) == list(range(pool.num_blocks)), "a block is in two places, or in none"
        nodes = list(tree.nodes())
        indexed = self._indexed()
        assert not indexed & set(free), "a free block can be hit"
        assert set(idle) <= indexed, "an idle block can never be hit"
        assert sum(block != GONE for node in nodes for block in node.block_ids) == len(indexed), "it is indexed twice"
        paths, told = dict[Node, bytes](), dict[int, tuple[int, bytes]]()
        for node in nodes:
            assert node.parent is not None
            paths[node] = paths.get(node.parent, node.parent.key + b"|") + node.key
            told.update({block: (group, paths[node]) for group, block in enumerate(node.block_ids) if block != GONE})
        assert self.resident == told, "the events tell another cache"
        place = {block: index for index, block in enumerate(idle)}
        for node in nodes:
            self._check_node(node, place)
        groups = self.core.status().kv_group_blocks
        assert sum(one.used for one in groups) == len(held)
        assert [one.cached for one in groups] == [sum(told[b][0] == g for b in idle) for g in range(len(groups))]
        orders = [request.order for request in running]
        assert orders == sorted(orders)
        for request in running:
            self._check_path(request)
            self._check_window_blocks(request.block_tables, request.num_computed_tokens - request.num_dropped_tokens, 0)

    def _check_node(self, node: Node, place: dict[int, int]) -> None:
        """place: of each idle block, in the order in which they would go."""
        growing = [group for group, window in enumerate(self.windows) if window is None]
        assert all(node.block_ids[group] != GONE for group in growing)
        assert any(block != GONE for block in node.block_ids) or any(node.children()), "a node without use"
        parent = node.parent.block_ids if node.parent is not None else ()
        for group in growing if parent else ():
            if parent[group] in place:
                assert node.block_ids[group] in place, "a parent is idle while its child is held"
                assert place[node.block_ids[group]] < place[parent[group]], "it is available, and cannot be had"
        if growing and node.block_ids[growing[0]] in place:
            assert all(block in place for block in node.block_ids if block != GONE), "it is held and would be evicted"

    def _check_path(self, request: Request) -> None:
        node, size = request.node, self.spec.block_size
        for index in reversed(range(request.num_committed_blocks)):
            assert node is not None
            for one, table in zip(node.block_ids, request.block_tables, strict=True):
                assert table[index] in (one, GONE), "a table is no path"
            assert node.key == request.token_ids[index * size : (index + 1) * size].tobytes()
            node = node.parent
        assert node is None or node.key == request.namespace.encode(), "a path of another namespace"


def any_choice(rng: random.Random) -> KeepPolicy:
    """A small policy that chooses by attention."""
    recent = rng.randrange(1, 5)
    if rng.random() < 0.5:
        return SnapKV(recent + rng.randrange(1, 8), recent, 1)
    return HeavyHitters(recent + rng.randrange(1, 8), recent, rng.randrange(1, 6))


def storm(
    harness: Harness, rng: random.Random, num_actions: int, *, streaming: bool = False, choosing: bool = False
) -> None:
    """Random life: prompts that share prefixes, branches, ends in any state, then everything drains.

    With `streaming`, half of the requests keep their first and their recent tokens only; with `choosing`, what
    attention chose.
    """
    shared = [[rng.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(2)]
    for _ in range(num_actions):
        action = rng.random()
        if action < 0.4:
            tail = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 6))]
            prompt = rng.choice(shared)[: rng.randrange(25)] + tail
            namespace, priority = rng.choice(["", "", "", "other"]), rng.choice([0, 0, 0, -1, 1])
            harness.add(prompt, rng.randrange(1, 12), namespace=namespace, priority=priority)
            if streaming:
                keep: KeepPolicy = StreamingLLM(rng.randrange(1, 4), rng.randrange(1, 9), rng.randrange(1, 5))
                harness.add(prompt, rng.randrange(1, 30), namespace=namespace, priority=priority, keep=keep)
            if choosing:
                keep = any_choice(rng)
                harness.add(prompt, rng.randrange(1, 30), namespace=namespace, priority=priority, keep=keep)
        elif action < 0.45 and harness.unfinished:
            harness.end(rng.choice(list(harness.unfinished)), as_stop=rng.random() < 0.3)
        elif action < 0.55 and harness.scheduler.running:
            harness.fork(rng.choice(harness.scheduler.running).request_id, rng.randrange(1, 12))
        elif action < 0.57 and harness.scheduler.running:
            harness.executor.fail_next[rng.choice(harness.scheduler.running).request_id] = "told to fail"
        elif harness.core.has_work:
            harness.step()
    harness.executor.fail_next.clear()
    harness.empty()


def branch_storm(harness: Harness, rng: random.Random, num_actions: int) -> None:
    """As `storm`, most requests having several branches."""
    shared = [[rng.randrange(3) for _ in range(24)] for _ in range(2)]
    for _ in range(num_actions):
        action = rng.random()
        prompt = rng.choice(shared)[: rng.randrange(25)] + [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        eos, max_tokens, priority = rng.choice([(), (0,)]), rng.randrange(1, 12), rng.choice([0, 0, 0, -1])
        if action < 0.15:
            harness.add_branches(prompt, max_tokens, width=rng.randrange(2, 5), eos=eos, priority=priority)
        elif action < 0.3:
            width = rng.randrange(1, 5)
            early, penalty = rng.choice([True, False, "never"]), rng.choice([0.0, 1.0, 2.0, -1.0])
            about = {"n": rng.randrange(1, width + 1), "early_stopping": early, "length_penalty": penalty}
            about["min_tokens"] = rng.choice([0, 0, 2 if max_tokens > 2 else 0])
            harness.add_branches(
                prompt, max_tokens, width=width, use_beam_search=True, eos=eos, priority=priority, **about
            )
        elif action < 0.35:
            harness.add(prompt, max_tokens, eos=eos, priority=priority)
        elif action < 0.42 and harness.unfinished:
            harness.end(rng.choice(list(harness.unfinished)), as_stop=rng.random() < 0.6)
        elif action < 0.46 and harness.scheduler.running:
            last = harness.scheduler.running[-1].request_id  # often one that others wait to join
            if last in harness.unfinished:
                harness.end(last, as_stop=True)
        elif action < 0.48 and harness.unfinished:
            harness.executor.fail_next[rng.choice(list(harness.unfinished))] = "told to fail"
        elif harness.core.has_work:
            harness.step()
    harness.executor.fail_next.clear()
    harness.empty()


def squeeze(rng: random.Random, windows: Windows = (None,)) -> Harness:
    """Branches and long answers fill a tight pool, then an urgent long prompt comes in small chunks: preemption."""
    num_blocks = 15 if any(windows) else 24  # of each group; behind a window less is needed
    harness = Harness(block_size=2, num_blocks=num_blocks, budget=5, seats=4, windows=windows)
    for _ in range(3):
        harness.add([rng.randrange(VOCAB_SIZE) for _ in range(3)], 18, priority=rng.choice([0, 1]))
    for _ in range(rng.randrange(4, 10)):
        harness.step()
    harness.add([rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(12, 20))], 8, priority=-1)
    for _ in range(2):
        harness.add([rng.randrange(VOCAB_SIZE) for _ in range(8)], 8)
    harness.empty()
    return harness
