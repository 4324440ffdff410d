"""`octavo doctor`: prints what `health` found. It does not know how anything is found."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from octavo.cli.health import Health


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--measure/--no-measure", default=True, show_default=True, help="Measure memory and kernels (seconds).")
@click.pass_context
def doctor(context: click.Context, as_json: bool, measure: bool) -> None:
    """Say what this machine and this installation can do, and what is wrong with them.

    The exit code is 1 when something keeps octavo from running a model.
    """
    from octavo.cli.health import examine
    from octavo.cli.model_cache import cache_dir

    health = examine(cache_dir(), measure=measure)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(health), indent=2))
    else:
        click.echo("\n".join(report(health)))
    context.exit(1 if any(problem.fatal for problem in health.problems) else 0)


def report(health: Health) -> list[str]:
    """The lines for a reader."""
    from octavo.cli.units import format_bytes

    others = [name for name in health.instruction_sets if name != health.instruction_set]
    instruction_set = health.instruction_set or "none: the kernels cannot be loaded"
    lines = [
        f"octavo            {health.octavo}",
        f"python            {health.python}",
        f"processor         {health.processor}",
        f"instruction set   {instruction_set}" + (f" (also: {', '.join(others)})" if others else ""),
        f"cores, threads    {health.cores} usable, {health.threads} used unless --threads says otherwise",
        f"memory available  {format_bytes(health.memory_available_bytes)}",
    ]
    if health.read_bytes_per_s is not None:
        lines.append(f"memory read       {health.read_bytes_per_s / 1e9:.1f} GB/s, measured")
    for dtype, speed in health.linear_flops_per_s.items():
        lines.append(f"linear {dtype:<11}{speed / 1e9:.0f} GFLOP/s, measured")
    lines += [
        f"compiler          {health.compiler or 'none (needed to install only)'}",
        f"model cache       {health.cache_dir}",
        "packages          " + ", ".join(f"{name} {version}" for name, version in health.packages.items()),
    ]
    for problem in health.problems:
        lines.append(f"{'PROBLEM' if problem.fatal else 'warning'}: {problem.what}; {problem.cure}")
    return lines if health.problems else [*lines, "no problems found"]
