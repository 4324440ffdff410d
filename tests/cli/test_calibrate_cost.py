"""`octavo calibrate-cost`: from a model, from a recording, from a table, and what its file is good for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.replay.cost_fit import read_cost
from octavo.replay.cost_model import StepWork
from octavo.replay.recorder import Recorder
from tests.cli.conftest import CommandLine
from tests.replay.trace_files import write_lines


def test_a_model_on_this_machine(tiny_model: Path, tmp_path: Path, command_line: CommandLine) -> None:
    cost = tmp_path / "cost.json"
    flags = ("--seconds", "1", "--kv-cache-memory", "64MiB", "--threads", "1")
    ended = command_line("calibrate-cost", tiny_model, "--output", cost, *flags)
    assert ended.code == 0, ended.err
    assert "steps; a step's time is off by" in ended.out
    found = json.loads(cost.read_text())
    assert found["steps"] > 80, "every size ran once"
    assert found["about"]["cores"] >= 1
    made = read_cost(cost)
    assert made.fixed_s + made.token_s + made.weights_s > 0
    replayed = command_line(
        "replay", "generate:lengths,requests=5,prompt=20,output=5", "--mode", "timed", "--cost", cost, "--json"
    )
    assert json.loads(replayed.out)["cost_model"] == made.name


def test_a_recording_has_the_time_of_each_step(
    tmp_path: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.replay import recorded_load

    class Ticking(Recorder):  # a clock that a step moves
        def __init__(self, path: Path, core: object, key: bytes, clock: object, about: dict[str, object]) -> None:
            times = iter(range(10**9))
            super().__init__(path, core, key, lambda: next(times) * 0.001, about)  # type: ignore[arg-type]

    monkeypatch.setattr(recorded_load, "Recorder", Ticking)
    recorded_load.recorded_run(tmp_path / "run.jsonl")
    cost = tmp_path / "cost.json"
    assert command_line("calibrate-cost", tmp_path / "run.jsonl", "--output", cost).code == 0
    assert json.loads(cost.read_text())["steps"] > 50
    assert read_cost(cost).step_s(StepWork(1, 1, 1, 1)) == pytest.approx(0.001, rel=0.1), "one tick, plan to result"


def test_a_table_of_steps(tmp_path: Path, command_line: CommandLine) -> None:
    rows = [f"{16 * n},{n % 4},{5 + 0.1 * 16 * n:.3f}" for n in range(1, 60)]
    path = write_lines(tmp_path / "steps.csv", ["num_context_tokens,num_decode_tokens,latency_ms", *rows], packed=False)
    assert command_line("calibrate-cost", path, "--output", tmp_path / "cost.json").code == 0
    assert read_cost(tmp_path / "cost.json").token_s == pytest.approx(1e-4, rel=0.05)


def test_too_little_is_refused(tmp_path: Path, command_line: CommandLine) -> None:
    path = write_lines(tmp_path / "steps.csv", ["num_context_tokens,num_decode_tokens,latency_ms", "5,1,2.0"])
    ended = command_line("calibrate-cost", path, "--output", tmp_path / "cost.json")
    assert ended.code == 1
    assert "1 measured steps are too few" in ended.err
    assert not (tmp_path / "cost.json").exists()
