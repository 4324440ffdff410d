"""`octavo calibrate-cost`: fits a cost model to steps that are measured here, or that somebody else measured."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.model_flags import model_flags

if TYPE_CHECKING:
    from octavo.replay.cost_fit import MeasuredStep


@click.command("calibrate-cost")
@click.argument("source", metavar="MODEL|FILE")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("cost.json"),
    show_default=True,
    help="Where the cost model goes.",
)
@click.option("--seconds", type=click.FloatRange(1.0), default=20.0, show_default=True, help="How long to measure.")
@model_flags
def calibrate_cost(source: str, output: Path, seconds: float, **values: Any) -> None:
    """Fit a cost model for `octavo replay --cost`.

    From MODEL, which is loaded and run on this machine; or from FILE: a recording of `octavo serve --record`, or a CSV
    of measured steps (num_context_tokens, num_decode_tokens, latency_ms).
    """
    from octavo.replay.cost_fit import fit, write_cost

    path = Path(source)
    about: dict[str, object] = {"source": path.name}
    if path.is_file() and path.name.removesuffix(".gz").endswith(".csv"):
        from octavo.replay.cost_fit import read_step_latencies

        steps = read_step_latencies(path)
    elif path.is_file() and path.name.removesuffix(".gz").endswith((".json", ".jsonl")):
        steps = _of_recording(source)
    else:
        steps = _measured(source, seconds, values)
        about = {
            "model": source,
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
    made = fit(steps, f"fitted from {path.name}")
    write_cost(output, made, about)
    click.echo(
        f"{made.steps} steps; a step's time is off by {made.median_error:.1%} in the median, by at most "
        f"{made.p90_error:.1%} for nine of ten; a prompt token takes {made.cost.token_s * 1e6:.1f} us\nwrote {output}"
    )


def _of_recording(source: str) -> list[MeasuredStep]:
    import json

    from octavo.replay.lines import BadLines, read_lines
    from octavo.replay.recording import RecordingReplay

    lines = read_lines(source, BadLines())
    first = next(lines, None)
    replay = RecordingReplay(json.loads(first.text) if first is not None else {})
    replay.run(lines)
    return replay.measured_steps


def _measured(model: str, seconds: float, values: dict[str, Any]) -> list[MeasuredStep]:
    from octavo.cli.loading import check_flags, load_checked
    from octavo.replay.calibration import StepProbe, run_rounds

    opened = load_checked(model, check_flags(values))
    loaded = opened.loaded
    probe = StepProbe(loaded.core, time.perf_counter)
    end_s = time.perf_counter() + seconds
    length = min(loaded.max_model_len, loaded.plan.kv_tokens // 24)  # the largest round fits
    run_rounds(
        loaded.core,
        max_model_len=max(2, length),
        vocab_size=loaded.vocab_size,
        until=lambda: time.perf_counter() >= end_s,
    )
    return probe.steps
