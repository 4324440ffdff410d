"""A plan as one JSON object, and as rows of CSV. Names are those of `/v1/kv/status` where both have the figure."""

from __future__ import annotations

import csv
import io
from typing import Any

from octavo.planner.cache_bytes import entry_bytes
from octavo.planner.comparisons import Comparisons
from octavo.planner.figures import figures_of, plain
from octavo.planner.plan import Plan
from octavo.planner.quantisation import bytes_by_storage


def report(plan: Plan, comparisons: Comparisons, *, explain: bool = False) -> dict[str, Any]:
    """Everything that is known, as values that JSON has; with `explain` the formula of each figure as well."""
    figures = figures_of(plan)
    found: dict[str, Any] = {figure.name: figure.value for figure in figures}
    found["exact"] = plan.is_exact
    found["kv_groups"] = groups(plan)
    found["weights_bytes_by_storage"] = (
        bytes_by_storage(plan.geometry) if plan.geometry.stored_bytes is None else {"file": plan.geometry.stored_bytes}
    )
    found["tensor_parallel_size"], found["pipeline_parallel_size"] = plan.request.ranks
    found["rank_weights_bytes"] = plan.rank_weights_bytes
    found["rank_kv_bytes_per_token"] = plain(plan.rank_cache.bytes_per_token)
    found.update(comparisons.tables())
    found["notes"] = list(plan.notes)
    if explain:
        found["formulas"] = {figure.name: figure.formula for figure in figures}
    return found


def groups(plan: Plan) -> list[dict[str, Any]]:
    cache = plan.cache
    return [
        {
            "name": group.name,
            "kind": "pair" if group.kind in ("full", "window") else group.kind,
            "num_layers": group.num_layers,
            "layers": list(group.layer_indices),
            "num_kv_heads": group.num_kv_heads,
            "head_dim": group.head_dim,
            "v_head_dim": group.v_head_dim,
            "window": group.window,
            "tokens_per_entry": group.tokens_per_entry,
            "kv_format": "fp8" if group.kind == "index" else group.kv_format or cache.kv_format,
            "bytes_per_entry": entry_bytes(group, cache.kv_format) * group.num_layers if group.kind != "state" else 0,
            "bytes_per_token": plain(cache.per_token(group)) if group.kind != "state" else 0,
            "bytes_per_sequence": cache.per_sequence(group),
            "kv_bytes": plan.request.batch * cache.of_group(group, plan.context),
        }
        for group in cache.groups
    ]


def as_csv(plan: Plan, comparisons: Comparisons) -> str:
    """One row a figure, then one a row of each comparison: name, value, unit."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["figure", "value", "unit", "formula"])
    for figure in figures_of(plan):
        writer.writerow([figure.name, "" if figure.value is None else figure.value, figure.unit, figure.formula])
    for group in groups(plan):
        for key in ("num_layers", "num_kv_heads", "head_dim", "window", "bytes_per_token", "kv_bytes"):
            value = group[key]
            writer.writerow([f"kv_groups.{group['name']}.{key}", "" if value is None else value, "", ""])
    for name, rows in comparisons.tables().items():
        for index, row in enumerate(rows if isinstance(rows, list) else [rows]):
            for key, value in row.items():
                writer.writerow([f"{name}.{index}.{key}", "" if value is None else value, "", ""])
    return out.getvalue()
