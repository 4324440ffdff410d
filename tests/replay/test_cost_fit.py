"""Cost models from measured steps: what made the times is found again, strange steps do not decide, files come back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.replay.cost_fit import MeasuredStep, fit, read_cost, read_step_latencies, write_cost
from octavo.replay.cost_model import CostModel, StepWork
from tests.replay.trace_files import write_lines

TRUE = CostModel("true", 64 * 2e-4, 2e-4, 0.0, 1e-4, 3e-7, 2e-9, 5e-3)


def steps(count: int, *, strange: float = 0.0, seed: int = 0) -> list[MeasuredStep]:
    chance, found = random.Random(seed), []
    for _ in range(count):
        decode = chance.randrange(0, 64)
        prompt = chance.choice((0, 0, chance.randrange(1, 2048)))
        read = chance.randrange(20, 4000) * decode
        work = StepWork(decode + prompt, decode + 1, read + prompt, read + prompt * prompt // 2)
        if not work.num_tokens:
            continue
        seconds = TRUE.step_s(work) * chance.uniform(0.98, 1.02)
        if chance.random() < strange:
            seconds = 0.011
        found.append(MeasuredStep(work, seconds))
    return found


def test_what_made_the_times_is_found_again() -> None:
    made = fit(steps(400), "fitted")
    assert made.median_error < 0.015
    assert made.cost.token_s == pytest.approx(TRUE.token_s, rel=0.05)
    assert made.cost.read_token_s == pytest.approx(TRUE.read_token_s, rel=0.1)
    unseen = steps(100, seed=1)
    errors = sorted(abs(made.cost.step_s(one.work) / one.seconds - 1) for one in unseen)
    assert errors[len(errors) // 2] < 0.02


def test_strange_steps_do_not_decide() -> None:
    assert fit(steps(600, strange=0.05), "fitted").cost.token_s == pytest.approx(TRUE.token_s, rel=0.05)


def test_no_coefficient_is_below_zero() -> None:
    flat = [MeasuredStep(StepWork(n, 1, 10 * n, 100), 0.01 - n * 1e-6) for n in range(1, 200)]
    cost = fit(flat, "falling").cost
    assert min(cost.fixed_s, cost.token_s, cost.weights_s, cost.head_token_s, cost.read_token_s, cost.pair_s) >= 0


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 measured steps are too few"):
        fit(steps(400)[:5], "fitted")


def test_a_file_of_latencies(tmp_path: Path) -> None:
    rows = ["num_context_tokens,num_decode_tokens,latency_ms", "128,0,17.1", "0,4,14.5", "0,0,3.0"]
    found = read_step_latencies(write_lines(tmp_path / "a.csv", rows))
    assert found == [MeasuredStep(StepWork(128, 0), 0.0171), MeasuredStep(StepWork(4, 4), 0.0145)]
    with pytest.raises(ConfigError, match="no columns num_context_tokens"):
        read_step_latencies(write_lines(tmp_path / "b.csv", ["a,b"]))
    with pytest.raises(ConfigError, match=r"line 2 is no row of numbers: 'x,y,z'"):
        read_step_latencies(write_lines(tmp_path / "c.csv", [rows[0], "x,y,z"]))


def test_a_cost_model_comes_back_from_its_file(tmp_path: Path) -> None:
    made = fit(steps(100), "fitted")
    write_cost(tmp_path / "cost.json", made, {"machine": "a test"})
    assert read_cost(tmp_path / "cost.json") == made.cost
    with pytest.raises(ConfigError, match="there is no cost model"):
        read_cost(tmp_path / "none.json")
    for text in ("{", "[]", '{"cost": {"fixed_s": -1}}', '{"cost": {"fixed_s": "x"}}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match=r"bad\.json"):
            read_cost(tmp_path / "bad.json")
