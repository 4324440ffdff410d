"""The simulator is the engine: what was recorded happens again in another process, event by event."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core import events
from octavo.core.block_manager import BlockManager
from octavo.core.config import SchedulerConfig
from octavo.core.engine_core import EngineCore
from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import StepPlan, StepResult
from octavo.replay.event_lines import BLOCK_EVENTS, ResidentBlocks
from octavo.replay.lines import BadLines, TraceError, read_lines
from octavo.replay.recorder import Recorder
from octavo.replay.recording import RecordingReplay, RecordingReport, requests_of
from octavo.replay.token_mask import MAX_TOKEN, TokenMask
from octavo.testing.checking_executor import CheckingExecutor
from tests.replay.recorded_load import END_TOKEN, KINDS, VOCAB_SIZE, params_of, recorded_run

SOURCES = Path(__file__).parents[2] / "src"


def replayed(path: Path) -> RecordingReport:
    lines = read_lines(str(path), BadLines())
    return RecordingReplay(json.loads(next(lines).text)).run(lines)


def lines_of(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in data.decode().splitlines()]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "run.jsonl"
    core = recorded_run(path)
    assert core.status().preemptions > 0
    return path


def test_the_load_has_every_kind_of_block_event(recording: Path) -> None:
    kinds = {line["event"][0] for line in lines_of(recording) if "event" in line}
    assert kinds >= set(BLOCK_EVENTS)


def test_another_process_does_the_same(recording: Path) -> None:
    """Law 3."""
    code = (
        "import json, sys\n"
        "from octavo.replay.lines import BadLines, read_lines\n"
        "from octavo.replay.recording import RecordingReplay\n"
        "lines = read_lines(sys.argv[1], BadLines())\n"
        "report = RecordingReplay(json.loads(next(lines).text)).run(lines)\n"
        "print(json.dumps([report.is_same, sum(report.events.values()), report.resident_blocks, report.cached_blocks]))"
    )
    command = [sys.executable, "-c", code, str(recording)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SOURCES)})
    is_same, count, resident, cached = json.loads(done.stdout)
    assert is_same
    assert count == sum("event" in line for line in lines_of(recording)) > 1000
    assert resident == cached


@pytest.mark.parametrize("seed", range(1, 7))
@pytest.mark.parametrize("windows", [(None,), (None, None), (None, 9), (9,)], ids=str)
def test_many_loads(tmp_path: Path, seed: int, windows: tuple[int | None, ...]) -> None:
    path = tmp_path / "run.jsonl.gz"
    core = recorded_run(path, seed=seed, num_blocks=30, num_requests=40, windows=windows)
    report = replayed(path)
    assert report.difference is None
    assert report.requests == 40
    assert report.steps == core.status().steps
    assert report.tokens == core.status().processed_tokens
    nodes = core.scheduler.blocks.tree.nodes()
    resident = sum(block_id >= 0 for node in nodes for block_id in node.block_ids)
    assert report.resident_blocks == report.cached_blocks == resident
    assert ("pass" in report.events) is any(window is not None for window in windows)


@pytest.mark.parametrize("kind", [*BLOCK_EVENTS, "admit", "finish", "wait"])
def test_one_altered_event_is_found(recording: Path, tmp_path: Path, kind: str) -> None:
    lines = lines_of(recording)
    at = [number for number, line in enumerate(lines) if line.get("event", [""])[0] == kind and line["event"][1]][-1]
    lines[at]["event"] = altered(lines[at]["event"])
    path = tmp_path / "altered.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    difference = replayed(path).difference
    assert difference is not None
    assert difference.line == at + 1
    assert difference.recorded != difference.replayed


def altered(event: list[Any]) -> list[Any]:
    """The same, with its last number one more."""

    def change(value: Any) -> tuple[Any, bool]:
        if isinstance(value, bool):
            return not value, True
        if isinstance(value, int):
            return value + 1, True
        if isinstance(value, list):
            for at in range(len(value) - 1, -1, -1):
                new, done = change(value[at])
                if done:
                    return [*value[:at], new, *value[at + 1 :]], True
        return value, False

    changed, done = change(event)
    assert done
    return list(changed)


def test_an_event_that_is_missing_or_too_many_is_found(recording: Path, tmp_path: Path) -> None:
    lines = lines_of(recording)
    at = next(number for number, line in enumerate(lines) if line.get("event", [""])[0] == "evict")
    for some in ([*lines[:at], *lines[at + 1 :]], [*lines[: at + 1], *lines[at:]]):
        path = tmp_path / "altered.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in some))
        assert replayed(path).difference is not None


def test_a_token_that_was_changed_is_found(recording: Path, tmp_path: Path) -> None:
    """It is not compared itself, but blocks with it are other blocks."""
    lines = lines_of(recording)
    prompt = next(line for line in lines if "add" in line and len(line["prompt"]) > 20)
    prompt["prompt"][2] ^= 1
    path = tmp_path / "altered.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replayed(path).difference is not None


def test_a_recording_that_stops_inside_a_line_is_used_as_far_as_it_goes(recording: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes(recording.read_bytes()[:40_000])
    report = replayed(path)
    assert report.is_same
    assert not report.is_whole
    assert report.steps > 5


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"octavo_record": 9}, "no recording of version 1"),
        ({"octavo_record": 1}, "first line of the recording is damaged"),
    ],
)
def test_what_is_no_recording_is_refused(header: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        RecordingReplay(header)


def test_a_step_that_broke_off_is_done_again(tmp_path: Path) -> None:
    class Breaking:
        def __init__(self) -> None:
            self.inner = CheckingExecutor(4, vocab_size=7)
            self.breaks = False

        def execute(self, plan: StepPlan) -> StepResult:
            if self.breaks:
                raise RuntimeError("the executor broke")
            return self.inner.execute(plan)

    spec, executor = KVSpec((KVGroupSpec("g", (0,), 1, 16, "bf16"),), 4), Breaking()
    core = EngineCore(Scheduler(SchedulerConfig(6, 24, 96), BlockManager(spec, 30)), executor)
    recorder = Recorder(tmp_path / "run.jsonl", core, b"key", clock=lambda: 0.0, about={})
    core.add(Request("a", [1] * 30, SamplingParams(max_tokens=5), seed=0))
    core.step()
    executor.breaks = True
    with pytest.raises(RuntimeError, match="the executor broke"):
        core.step()
    core.fail_all("the engine failed")
    recorder.close()
    report = replayed(tmp_path / "run.jsonl")
    assert report.is_same
    assert report.events["finish"] == 1


def test_a_disk_that_fails_ends_the_recording_only(tmp_path: Path) -> None:
    spec = KVSpec((KVGroupSpec("g", (0,), 1, 16, "bf16"),), 4)
    core = EngineCore(Scheduler(SchedulerConfig(6, 24, 96), BlockManager(spec, 30)), CheckingExecutor(4, vocab_size=7))
    recorder = Recorder(tmp_path / "run.jsonl", core, b"key", clock=lambda: 0.0, about={})

    class Full:
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    assert recorder._out is not None
    recorder._out.close()
    recorder._out = Full()  # type: ignore[assignment]
    core.add(Request("a", [1] * 10, SamplingParams(max_tokens=3), seed=0))
    while core.has_work:
        core.step()
    assert recorder.error == "the recording ended: No space left on device"
    assert core.status().finished["length"] == 1


def test_a_recording_holds_no_token_no_text_and_no_name(recording: Path) -> None:
    text = recording.read_text()
    assert "tenant" not in text
    assert "request-" not in text
    adds = [line for line in lines_of(recording) if "add" in line]
    assert all(token > 1000 for line in adds for token in line["prompt"])


def test_texts_are_recorded_where_they_are_asked_for(tmp_path: Path) -> None:
    spec, chance = KVSpec((KVGroupSpec("g", (0,), 1, 16, "bf16"),), 4), random.Random(2)
    executor = CheckingExecutor(4, vocab_size=VOCAB_SIZE, keep_plans=False)
    core = EngineCore(Scheduler(SchedulerConfig(6, 24, 96), BlockManager(spec, 30)), executor)

    def decode(ids: Sequence[int]) -> str:
        return " ".join(str(one) for one in ids)

    path = tmp_path / "run.jsonl"
    recorder = Recorder(path, core, b"key", clock=lambda: 0.0, about={}, decode=decode)
    prompts, said = [], {}
    for number in range(40):
        prompts.append([chance.randrange(3) for _ in range(chance.randrange(1, 40))])
        params = params_of(KINDS[number % len(KINDS)], chance)
        core.add(Request(f"id#{number}", prompts[-1], params, seed=number, eos_token_ids=(END_TOKEN,)))
    while core.has_work:
        for output in core.step():
            tokens = said.setdefault((output.request_id, output.branch), [])
            tokens += [output.token.token_id] if output.token is not None else []
            if output.part is not None and output.part.token_ids:
                tokens[:] = output.part.token_ids
    recorder.close()
    lines = lines_of(path)
    assert [line["text"] for line in lines if "add" in line] == [decode(one) for one in prompts]
    answers = {(f"id#{line['answer'][1:]}", line["branch"]): line["text"] for line in lines if "answer" in line}
    assert answers == {which: decode(tokens) for which, tokens in said.items()}
    assert len(answers) > 50, "branches too"
    assert core.status().preemptions
    assert recorder._text is not None
    assert not recorder._text._drawn, "nothing of a request that ended is kept"
    assert replayed(path).is_same


def test_a_recording_is_a_trace(recording: Path) -> None:
    lines = read_lines(str(recording), BadLines())
    next(lines)
    requests = list(requests_of(lines))
    adds = [line for line in lines_of(recording) if "add" in line]
    assert [one.num_prompt_tokens for one in requests] == [len(line["prompt"]) for line in adds]
    assert sum(one.num_output_tokens for one in requests) > 100


def test_events_give_the_exact_set_of_resident_blocks(tmp_path: Path) -> None:
    """F22, after every step."""
    spec = KVSpec((KVGroupSpec("g", (0,), 1, 16, "bf16"),), 4)
    blocks = BlockManager(spec, 20)
    core = EngineCore(Scheduler(SchedulerConfig(4, 24, 64), blocks), CheckingExecutor(4, vocab_size=5))
    resident = ResidentBlocks()
    core.add_listener(resident)
    sizes = set()
    for number in range(40):
        text = [number % 3] * (number % 7) + [number % 5] * (1 + number % 19)
        core.add(Request(f"r{number}", text, SamplingParams(max_tokens=1 + number % 13), seed=number))
        for _ in range(number % 4):
            core.step()
            assert resident.blocks == {block for node in blocks.tree.nodes() for block in node.block_ids}
            sizes.add(len(resident.blocks))
        if number == 25:
            core.reset_prefix_cache()
            assert resident.blocks == {block for node in blocks.tree.nodes() for block in node.block_ids}
    assert len(sizes) > 8


TOKENS = st.lists(st.integers(0, 300_000), min_size=1, max_size=12)


@given(TOKENS, TOKENS)
@settings(max_examples=200, deadline=None)
def test_masked_texts_begin_alike_as_far_as_the_texts_do(one: list[int], other: list[int]) -> None:
    mask = TokenMask(b"key")
    other = one[: len(other) // 2] + other
    ids, others = (mask.mask_text(mask.begin(""), text)[0] for text in (one, other))
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    assert ids[:same] == others[:same]
    if same < min(len(one), len(other)):
        first, second = one[same].to_bytes(4, "little"), other[same].to_bytes(4, "little")
        masked, masked_other = (text[same].to_bytes(4, sys.byteorder) for text in (ids, others))
        assert (first < second) == (masked < masked_other), "the tree finds them in the same order"


def test_masks_depend_on_key_namespace_and_what_came_before() -> None:
    mask, other = TokenMask(b"key"), TokenMask(b"another")
    begin = mask.begin("")
    assert mask.mask(begin, 5) != other.mask(other.begin(""), 5)
    assert mask.mask(begin, 5) != mask.mask(mask.begin("a"), 5)
    assert mask.mask(begin, 5) != mask.mask(mask.extend(begin, 5), 5)
    assert mask.name("") == ""
    assert mask.name("tenant") != other.name("tenant")
    ids = [mask.mask(begin, token) for token in (0, 1, 2, 100_000, MAX_TOKEN)]
    assert len(set(ids)) == 5
    assert all(0 <= one < 2**32 - 256 for one in ids)


def test_every_event_has_a_line() -> None:
    from typing import get_args

    kinds = {kind.__name__ for kind in get_args(events.Event)}
    text = (SOURCES / "octavo" / "replay" / "event_lines.py").read_text()
    assert all(f"events.{kind}()" in text for kind in kinds)
