"""A plan for a terminal: a few tables of text, and each figure's formula where it is asked for.

It chooses what is shown and how numbers are written; every number comes from the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from octavo.planner.comparisons import Comparisons
from octavo.planner.figures import Figure, Value, figures_of
from octavo.planner.plan import Plan
from octavo.planner.report import groups

_HIDDEN = ("family", "kv_bytes_read_per_token")
TITLES = {
    "by_context": "The cache by context",
    "by_batch": "A decode step by batch",
    "formats": "Formats of the cache",
    "windows": "If every layer had a window",
    "heads": "Numbers of KV heads",
    "tensor_parallel": "Tensor-parallel ranks",
    "pipeline_parallel": "Pipeline stages",
    "recompute": "Multiply-adds with and without a cache",
    "contiguous": "Contiguous against paged",
    "prefix_sharing": "A prefix shared by many",
    "lengths": "Lengths from the file",
}


def show_bytes(num_bytes: float) -> str:
    """`1.25 GiB`, three digits."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB" if value < 1024 else f"{value / 1024:.4g} PiB"


def show_count(value: float) -> str:
    """`671.0 G` of what is counted by the thousand."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.4g} {letter}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def show(figure: Figure) -> str:
    """A figure's value as people read it, and exactly where that is another text."""
    value = figure.value
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if figure.unit.startswith("bytes"):
        exact = f" ({value:,} bytes)" if value >= 1024 else ""
        return show_bytes(value) + figure.unit.removeprefix("bytes") + exact
    if figure.unit == "s":
        return f"{value * 1e3:.4g} ms"
    return (
        f"{value:,.4g}"
        if isinstance(value, float)
        else f"{show_count(value)} ({value:,})"
        if value >= 1e6
        else f"{value:,}"
    )


def plan_text(plan: Plan, comparisons: Comparisons, *, explain: bool = False, wide: Sequence[str] = ()) -> str:
    """The plan as lines. `wide`: which comparisons are shown beside it; with `explain` each figure has its formula."""
    lines = []
    for figure in figures_of(plan):
        if figure.value is None and not explain:
            continue
        if figure.name in _HIDDEN and not explain:
            continue
        lines.append(f"{figure.name:<24} {show(figure)}")
        if explain:
            lines.append(f"{'':<24}   = {figure.formula}")
    if len(plan.cache.groups) > 1 or explain:
        lines += ["", "Groups of layers", *grid([_group_row(row) for row in groups(plan)])]
    tables = comparisons.tables()
    for name in wide:
        rows = tables.get(name)
        if rows:
            lines += ["", TITLES[name], *grid(rows if isinstance(rows, list) else [rows])]
    lines += ["", *(f"note: {note}" for note in plan.notes)] if plan.notes else []
    return "\n".join(lines)


def _group_row(row: dict[str, Any]) -> dict[str, Any]:
    keys = ("name", "kind", "num_layers", "num_kv_heads", "head_dim", "window", "bytes_per_token", "bytes_per_sequence")
    return {key: row[key] for key in (*keys, "kv_bytes")}


def grid(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Rows of one table, columns as wide as their longest cell."""
    rows = list(rows)
    names = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[heading(name) for name in names], *([cell_text(name, row.get(name)) for name in names] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(names))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def heading(name: str) -> str:
    """A column's name in words."""
    return name.replace("_bytes", "").replace("multiply_adds", "madds").replace("_", " ")


def cell_text(name: str, value: Value | bool) -> str:
    """A value of a column, by what its name says it is."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if "share" in name and isinstance(value, float):
        return f"{value:.1%}"
    if name.endswith("_s_per_step"):
        return f"{value * 1e3:.4g} ms"
    if "bytes" in name and "per_byte" not in name:
        return show_bytes(value)
    if "multiply_adds" in name and "per_byte" not in name:
        return show_count(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
