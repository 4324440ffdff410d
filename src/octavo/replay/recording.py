"""Does again what a recording tells, with a core of its own, and compares every event with the one that was recorded.

It knows nothing of the process that was recorded but the file.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from octavo.core.block_manager import BlockManager
from octavo.core.config import SchedulerConfig
from octavo.core.engine_core import EngineCore
from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import Row, SampledToken, StepPlan, StepResult, TokenLogprob
from octavo.errors import OctavoError
from octavo.replay.calibration import work_of_plan
from octavo.replay.cost_fit import MeasuredStep
from octavo.replay.event_lines import ResidentBlocks, event_line
from octavo.replay.lines import NumberedLine, TraceError
from octavo.replay.recorder import FIRST_END_ID, VERSION
from octavo.replay.trace import TraceRequest, token_array

Line = dict[str, Any]


class _StepBrokeError(Exception):
    """The recorded step did not end."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event that is not as recorded. None: there is none in its place."""

    number: int  # of the event, from 1
    line: int  # of the recording
    recorded: list[Any] | None
    replayed: list[Any] | None

    def __str__(self) -> str:
        return (
            f"event {self.number} (line {self.line}) differs: recorded {json.dumps(self.recorded)}, replayed "
            f"{json.dumps(self.replayed)}"
        )


@dataclass(frozen=True, slots=True)
class RecordingReport:
    requests: int
    steps: int
    tokens: int
    events: dict[str, int]  # kind -> how many were compared
    difference: Difference | None
    resident_blocks: int  # at the end, by commits and evictions
    cached_blocks: int  # at the end, by the radix tree
    is_whole: bool  # False: the recording stops inside a step

    @property
    def is_same(self) -> bool:
        return self.difference is None


class _RecordedExecutor:
    """Gives the results that were recorded."""

    def __init__(self) -> None:
        self.line: Line | None = None  # None: the step broke
        self.measured: list[MeasuredStep] = []

    def execute(self, plan: StepPlan) -> StepResult:
        line = self.line
        if line is None:
            raise _StepBrokeError
        if line.get("s", 0) > 0:
            self.measured.append(MeasuredStep(work_of_plan(plan).work, float(line["s"])))
        result = StepResult({}, num_tokens=int(line.get("tokens", plan.num_tokens)))
        result.failed.update(dict.fromkeys(line.get("failed", ()), "it failed when it was recorded"))
        for row in plan.rows:
            self._scores(row, result)
        for name, token in line.get("sampled", {}).items():
            value, logprob = token if isinstance(token, list) else (token, None)
            result.sampled[name] = SampledToken(int(value), logprob)
        for name, found in line.get("candidates", {}).items():
            result.candidates[name] = tuple(TokenLogprob(int(token), float(logprob)) for token, logprob in found)
        wanted = {name for row in plan.rows for name in _drawing(row)} - set(result.failed)
        missing = wanted - result.sampled.keys() - result.candidates.keys()
        if missing and not result.failed:
            raise TraceError(
                f"step {plan.step_index} draws a token for {sorted(missing)[0]}, which the recording does not have: it "
                "is of another version of octavo, or was changed"
            )
        return result

    @staticmethod
    def _scores(row: Row, result: StepResult) -> None:
        if row.prompt_scores is not None and row.request_id not in result.failed:
            result.prompt_scores[row.request_id] = tuple(SampledToken(0, 0.0) for _ in row.prompt_scores.targets)


def _drawing(row: Row) -> Iterator[str]:
    if row.sample is not None:
        yield row.request_id
    for branch in row.branch_samples:
        yield branch.request_id


@dataclass(slots=True)
class _Comparison:
    """Events as they come from both sides; each waits for the other."""

    recorded: deque[tuple[int, list[Any]]] = field(default_factory=deque)  # line, event
    replayed: deque[list[Any]] = field(default_factory=deque)
    counts: Counter[str] = field(default_factory=Counter)
    difference: Difference | None = None
    line: int = 0

    def settle(self) -> None:
        while self.recorded and self.replayed and self.difference is None:
            (line, recorded), replayed = self.recorded.popleft(), self.replayed.popleft()
            self.counts[recorded[0]] += 1
            if recorded != replayed:
                self.difference = Difference(self.counts.total(), line, recorded, replayed)

    def settle_rest(self) -> None:
        """Both have ended: what is left has nothing in its place."""
        self.settle()
        if self.difference is None and (self.recorded or self.replayed):
            line, recorded = self.recorded[0] if self.recorded else (self.line, None)
            replayed = self.replayed[0] if self.replayed else None
            self.difference = Difference(self.counts.total() + 1, line, recorded, replayed)


class RecordingReplay:
    """One recording. `run` raises TraceError for a file that is none, or that was changed beyond events."""

    def __init__(self, header: Line) -> None:
        if header.get("octavo_record") != VERSION:
            raise TraceError(
                f"this is no recording of version {VERSION} (its first line says {header.get('octavo_record')!r}); "
                "make one with `octavo serve --record FILE`"
            )
        try:
            groups = tuple(
                KVGroupSpec(**{**group, "layer_indices": tuple(group["layer_indices"])})
                for group in header["spec"]["groups"]
            )
            spec = KVSpec(groups, header["spec"]["block_size"])
            config = SchedulerConfig(**header["scheduler"])
            self.blocks = BlockManager(
                spec,
                header["num_blocks"],
                enable_prefix_caching=config.enable_prefix_caching,
                token_exact_hits=header["token_exact_hits"],
            )
        except (KeyError, TypeError, OctavoError) as error:
            raise TraceError(f"the first line of the recording is damaged ({error})") from error
        self._executor = _RecordedExecutor()
        self.core = EngineCore(Scheduler(config, self.blocks), self._executor)
        self._resident = ResidentBlocks()
        self._comparison = _Comparison()
        self.core.add_listener(self._resident)
        self.core.add_listener(lambda event: self._heard(event_line(event, str)))
        self._requests = self._steps = self._tokens = 0

    @property
    def measured_steps(self) -> list[MeasuredStep]:
        """The steps that were done again, with the time that each took when it was recorded."""
        return self._executor.measured

    def run(self, lines: Iterable[NumberedLine]) -> RecordingReport:
        """lines: those after the first."""
        comparison, is_whole = self._comparison, True
        for numbered in lines:
            try:
                line = json.loads(numbered.text)
            except ValueError:
                is_whole = False  # the process was killed while it wrote
                break
            comparison.line = numbered.number
            try:
                self._do(line, numbered.number)
            except (KeyError, TypeError, ValueError, AttributeError, AssertionError, OctavoError) as error:
                if isinstance(error, TraceError):
                    raise
                comparison.settle()
                if comparison.difference is not None:  # from then on nothing need fit
                    break
                raise TraceError(f"line {numbered.number} of the recording cannot be done again: {error}") from error
            comparison.settle()
            if comparison.difference is not None:
                break
        if is_whole:
            comparison.settle_rest()
        cached = sum(block_id >= 0 for node in self.blocks.tree.nodes() for block_id in node.block_ids)
        return RecordingReport(
            self._requests,
            self._steps,
            self._tokens,
            dict(comparison.counts),
            comparison.difference,
            len(self._resident.blocks),
            cached,
            is_whole,
        )

    def _heard(self, line: list[Any]) -> None:
        if line[0] != "add":
            self._comparison.replayed.append(line)

    def _do(self, line: Line, number: int) -> None:
        core = self.core
        if "event" in line:
            self._comparison.recorded.append((number, line["event"]))
        elif "add" in line:
            core.add(_request_of(line))
            self._requests += 1
        elif "step" in line:
            self._executor.line = line
            core.step()
            self._steps += 1
            self._tokens += int(line.get("tokens", 0))
        elif "end" in line:
            if line["reason"] == "stop":
                core.finish(line["end"], line["branch"])
            else:
                core.abort(line["end"])
        elif "fail" in line:
            self._fail(bool(line.get("in_step")))
        elif "reset" in line:
            core.reset_prefix_cache()

    def _fail(self, in_step: bool) -> None:
        if in_step:
            self._executor.line = None
            with suppress(_StepBrokeError):
                self.core.step()
        self.core.fail_all("it failed when it was recorded")


def _request_of(line: Line) -> Request:
    ends = tuple(FIRST_END_ID - at for at in range(line["end_tokens"]))
    params = SamplingParams(**line["params"], stop_token_ids=ends, ignore_eos=True)
    about = {"namespace": line["namespace"], "priority": line["priority"]}
    return Request(line["add"], line["prompt"], params, seed=0, **about)


def requests_of(lines: Iterable[NumberedLine]) -> Iterator[TraceRequest]:
    """A recording as a trace: lengths, masked texts and times; branches other than the first are left out.

    A request comes once it and all before it have ended.
    """
    coming: deque[Line] = deque()
    by_name: dict[str, Line] = {}
    for numbered in lines:
        line = json.loads(numbered.text)
        if "add" in line:
            line["output"] = []
            coming.append(line)
            by_name[line["add"]] = line
        elif "sampled" in line:
            for name, token in line["sampled"].items():
                if name in by_name:
                    by_name[name]["output"].append(token[0] if isinstance(token, list) else token)
        elif "event" in line and line["event"][0] == "finish":
            done = by_name.get(line["event"][1])
            if done is not None:
                done["is_done"] = True
        while coming and coming[0].get("is_done"):
            yield _trace_request(coming.popleft(), by_name)
    while coming:
        yield _trace_request(coming.popleft(), by_name)


def _trace_request(line: Line, by_name: dict[str, Line]) -> TraceRequest:
    by_name.pop(line["add"], None)
    prompt, output = token_array(line["prompt"]), token_array(line["output"])
    space = line["namespace"]
    about = {"tenant": space, "namespace": space}
    return TraceRequest(line["t"], len(prompt), len(output), (), 0, prompt, output, priority=line["priority"], **about)
