"""A cost model from measured steps, strange ones made light of, and its file. It measures nothing."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from octavo.errors import ConfigError
from octavo.replay.cost_model import CostModel, StepWork
from octavo.replay.lines import BadLines, read_lines

F64 = npt.NDArray[np.float64]
_KNEES = (0, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
MIN_STEPS = 20
_ROUNDS = 15
_TIME_FIELDS = tuple(field.name for field in fields(CostModel) if field.name != "name")


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    work: StepWork
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    cost: CostModel
    steps: int
    median_error: float  # of a step's time, relative
    p90_error: float


def fit(steps: Sequence[MeasuredStep], name: str) -> Fit:
    """Errors count relative to the step's time, so that short steps matter as much as long ones.

    Where few rows cost as much as one, which is so where reading the weights is what takes time, the knee is looked
    for among a few numbers of rows. Raises ConfigError for too few steps.
    """
    if len(steps) < MIN_STEPS:
        raise ConfigError(f"{len(steps)} measured steps are too few for a cost model; measure at least {MIN_STEPS}")
    works = [step.work for step in steps]
    seconds = np.array([step.seconds for step in steps])
    tokens = np.array([work.num_tokens for work in works], np.float64)
    others = [
        [work.num_sampled for work in works],
        [work.read_tokens for work in works],
        [w.score_pairs for w in works],
    ]
    best: tuple[float, int, F64] | None = None
    for knee in _KNEES:
        columns = np.stack([np.ones_like(tokens), np.maximum(tokens, knee), *np.array(others, np.float64)], axis=1)
        found = _robust(columns, seconds)
        error = float(_errors(columns @ found, seconds).mean())
        if best is None or error < best[0]:
            best = error, knee, found
    assert best is not None
    _, knee, found = best
    fixed, token, sampled, read, pair = (float(one) for one in found)
    cost = CostModel(name, token * knee, token, 0.0, sampled, read, pair, fixed)
    errors = np.abs(np.array([cost.step_s(work) for work in works]) / seconds - 1.0)
    return Fit(cost, len(steps), float(np.median(errors)), float(np.quantile(errors, 0.9)))


def _robust(columns: F64, seconds: F64) -> F64:
    """The least sum of errors, by least squares with weights that are found step by step.

    Logs of real engines hold steps whose time is another step's; they must not decide.
    """
    found = _non_negative(columns, seconds)
    for _ in range(_ROUNDS):
        made = np.maximum(columns @ found, 1e-9)
        size = np.maximum(made, seconds)
        weight = 1.0 / (size * np.sqrt(np.maximum(_errors(made, seconds), 0.01)))
        found = _non_negative(columns * weight[:, None], seconds * weight)
    return found


def _errors(made: F64, seconds: F64) -> F64:
    """Relative to the larger of the two: at most 1, whichever is wrong."""
    return np.asarray(np.abs(made - seconds) / np.maximum(made, seconds), np.float64)


def _non_negative(columns: F64, wanted: F64) -> F64:
    """Least squares; a coefficient that would be negative is 0 and left out."""
    active = list(range(columns.shape[1]))
    found = np.zeros(columns.shape[1])
    scale = np.abs(columns).max(axis=0)
    active = [at for at in active if scale[at] > 0]
    while active:
        some = np.linalg.lstsq(columns[:, active] / scale[active], wanted, rcond=None)[0] / scale[active]
        if (some >= 0).all():
            found[active] = some
            break
        active.pop(int(np.argmin(some * scale[active])))
    return found


def read_step_latencies(path: Path) -> list[MeasuredStep]:
    """CSV of `num_context_tokens, num_decode_tokens, latency_ms`: tokens of prompts, and requests in decode, of a step.

    What was read of K and V is not in such a file, so attention is part of the other terms.
    """
    lines = read_lines(str(path), BadLines())
    header = next(lines, None)
    wanted = ("num_context_tokens", "num_decode_tokens", "latency_ms")
    names = [] if header is None else next(csv.reader([header.text]))
    if any(name not in names for name in wanted):
        raise ConfigError(f"{path} has no columns {', '.join(wanted)}; it has {', '.join(names) or 'none'}")
    at = [names.index(name) for name in wanted]
    found = []
    for line in lines:
        row = next(csv.reader([line.text]))
        try:
            prompt, decode, milliseconds = int(row[at[0]]), int(row[at[1]]), float(row[at[2]])
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{line.name}, line {line.number} is no row of numbers: {line.text[:80]!r}") from error
        if milliseconds > 0 and prompt + decode > 0:
            found.append(MeasuredStep(StepWork(prompt + decode, decode), milliseconds / 1000))
    return found


def write_cost(path: Path, made: Fit, about: dict[str, object]) -> None:
    path.write_text(
        json.dumps(
            {
                "octavo_cost_model": 1,
                "cost": asdict(made.cost),
                "steps": made.steps,
                "median_error": made.median_error,
                "p90_error": made.p90_error,
                "about": about,
            },
            indent=1,
        )
        + "\n",
        encoding="utf-8",
    )


def read_cost(path: Path) -> CostModel:
    """Raises ConfigError for a file that `write_cost` did not write."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        cost = found["cost"]
        times = {name: float(cost[name]) for name in _TIME_FIELDS}
    except FileNotFoundError as error:
        raise ConfigError(f"there is no cost model {path}; make one with `octavo calibrate-cost`") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no cost model ({error}); make one with `octavo calibrate-cost`") from error
    if any(not 0 <= value < 1e6 for value in times.values()):
        raise ConfigError(f"{path} has a time that is no number of seconds from 0 on; make it again")
    return CostModel(str(cost.get("name", path.name)), **times)
