"""The charts of a plan: the cache beside the weights by context, throughput by batch. Numbers come from the plan."""

from __future__ import annotations

from pathlib import Path

from octavo.errors import ConfigError
from octavo.planner.chart import Chart, Drawing, Series, draw
from octavo.planner.plan import Plan
from octavo.planner.png import as_png
from octavo.planner.svg import as_svg
from octavo.planner.tables import show_bytes

CONTEXTS = tuple(1 << power for power in range(8, 21))
BATCHES = (1, 8, 64)
STEPS = tuple(1 << power for power in range(10))


def check_kind(path: Path) -> None:
    """Raises ConfigError for an ending that is neither .svg nor .png."""
    if path.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"--plot {path} ends in {path.suffix.lower() or 'nothing'}; it must end in .svg or .png")


def write_plot(plan: Plan, path: Path) -> None:
    """A .svg or .png file; ConfigError for any other ending, or a place that cannot be written."""
    check_kind(path)
    write_drawing(draw(charts(plan)), path)


def write_drawing(drawing: Drawing, path: Path) -> None:
    """Raises ConfigError as `write_plot`."""
    check_kind(path)
    data = as_svg(drawing).encode() if path.suffix.lower() == ".svg" else as_png(drawing)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written ({error.strerror}); give another place") from error


def charts(plan: Plan) -> list[Chart]:
    found = [by_context(plan)]
    if plan.request.hardware is not None and plan.weights_bytes:
        found.append(_by_batch(plan))
    return found


def by_context(plan: Plan) -> Chart:
    """The cache by context for several batches, beside weights and memory."""
    series = [
        Series(
            f"batch {batch}",
            tuple((float(context), float(plan.cache.of(context, batch))) for context in CONTEXTS),
        )
        for batch in sorted({*BATCHES, plan.request.batch})
    ]
    ends = (float(CONTEXTS[0]), float(CONTEXTS[-1]))
    for name, level in (("weights", plan.weights_bytes), ("memory", plan.request.memory_bytes)):
        if level:
            series.append(Series(name, tuple((end, float(level)) for end in ends), is_level=True))
    kept = tuple(Series(each.name, tuple(p for p in each.points if p[1] > 0), each.is_level) for each in series)
    return Chart(
        f"KV cache of {plan.geometry.model} in {plan.cache.kv_format}",
        "tokens of a sequence",
        "bytes",
        tuple(each for each in kept if each.points),
        show_tokens,
        show_bytes,
    )


def _by_batch(plan: Plan) -> Chart:
    hardware = plan.request.hardware
    assert hardware is not None
    ranks = plan.request.ranks[0]
    points = tuple((float(batch), batch / plan.step_of(batch).seconds(hardware, ranks)) for batch in STEPS)
    return Chart(
        f"Bound of throughput at {plan.context} tokens on {hardware.name}",
        "sequences in a step",
        "tokens a second",
        (Series("roofline", points),),
        lambda value: f"{value:g}",
        lambda value: f"{value:,.0f}",
    )


def show_tokens(value: float) -> str:
    """`4K` for 4,096."""
    return f"{value:g}" if value < 1024 else f"{value / 1024:g}K" if value < 1 << 20 else f"{value / (1 << 20):g}M"
