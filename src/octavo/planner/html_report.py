"""The plan as one HTML page that needs no network: tables of the plan, and sliders that compute on its numbers.

The page's own arithmetic is in `page/report.js`; a test holds it equal to the planner's. It opens as a file.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape
from importlib.resources import files
from typing import Any

from octavo.planner.arithmetic import Work
from octavo.planner.cache_bytes import FORMATS, entry_bytes, state_bytes
from octavo.planner.comparisons import Comparisons
from octavo.planner.figures import figures_of
from octavo.planner.geometry import KVGroup
from octavo.planner.plan import DEVICE_SHARE, Plan
from octavo.planner.tables import TITLES, cell_text, heading, show
from octavo.replay.hardware import CATALOGUE

_CONTEXTS = [1 << power for power in range(8, 21)]
_BATCHES = [1 << power for power in range(10)]
_FORMATS = ("f32", "bf16", "f16", "fp8", "q8_0", "q4_0")


def html_report(plan: Plan, comparisons: Comparisons) -> str:
    """The whole page as text."""
    page = files("octavo.planner") / "page"
    exact = "exact" if plan.is_exact else "modelled"
    parts = {
        "TITLE": escape(plan.geometry.model),
        "SUBTITLE": escape(
            f"{plan.geometry.attention}, {plan.geometry.parameters:,} parameters, planned for {plan.request.engine} "
            f"({exact})"
        ),
        "STYLE": (page / "report.css").read_text(encoding="utf-8"),
        "FIGURES": _figures(plan),
        "TABLES": _tables(comparisons),
        "FOOTER": escape("; ".join(plan.notes) or "Bounds are the roofline's, not measurements."),
        "DATA": json.dumps(page_data(plan)).replace("<", "\\u003c"),
        "SCRIPT": (page / "report.js").read_text(encoding="utf-8"),
    }
    text = (page / "report.html").read_text(encoding="utf-8")
    pieces = text.split("@")
    return "".join(parts.get(piece, piece) if index % 2 else piece for index, piece in enumerate(pieces))


def page_data(plan: Plan) -> dict[str, Any]:
    """Every number that the page computes with."""
    geometry, work = plan.geometry, plan.work
    formats = list(dict.fromkeys((*_FORMATS, plan.cache.kv_format)))
    heads = _head_choices(plan)
    hardware: list[dict[str, Any]] = [{"name": "none"}]
    hardware += [
        {
            "name": each.name,
            "memory_bytes": each.memory_bytes,
            "bandwidth_bytes_s": each.bytes_per_s,
            "flops": each.flops_per_s,
            "source": each.source,
        }
        for each in CATALOGUE
    ]
    contexts = sorted({*_CONTEXTS, plan.context})
    batches = sorted({*_BATCHES, plan.request.batch})
    chosen = plan.request.hardware.name if plan.request.hardware else "none"
    return {
        "weights_bytes": plan.weights_bytes,
        "weights_name": f"{plan.weights_bytes} bytes, {plan.weights_dtype}",
        "memory_share": DEVICE_SHARE,
        "per_row": work.per_row,
        "head": work.head,
        "read_shares": _read_shares(plan),
        "groups": [_group(plan, work, group) for group in geometry.groups],
        "choices": {
            "context": contexts,
            "batch": batches,
            "format": [_format(name) for name in formats],
            "heads": heads,
            "hardware": hardware,
        },
        "start": {
            "context": contexts.index(plan.context),
            "batch": batches.index(plan.request.batch),
            "format": formats.index(plan.cache.kv_format),
            "heads": 0,
            "hardware": [each["name"] for each in hardware].index(chosen),
        },
    }


def _format(name: str) -> dict[str, Any]:
    k, v = FORMATS[name]
    return {"name": name, "k": asdict(k), "v": asdict(v)}


def _group(plan: Plan, work: Work, group: KVGroup) -> dict[str, Any]:
    return {
        "name": group.name,
        "kind": group.kind,
        "layers": group.num_layers,
        "num_kv_heads": group.num_kv_heads,
        "head_dim": group.head_dim,
        "v_head_dim": group.v_head_dim,
        "window": group.window,
        "format": None if group.kv_format is None else _format(group.kv_format),
        "read_tokens": group.read_tokens,
        "tokens_per_entry": group.tokens_per_entry,
        "index_bytes": entry_bytes(group, plan.cache.kv_format) if group.kind == "index" else 0,
        "state_bytes": state_bytes(group, plan.cache.dtype),
        "per_key": 0 if group.kind == "state" else work.per_key(group),
    }


def _head_choices(plan: Plan) -> list[dict[str, Any]]:
    heads = plan.geometry.num_heads
    found: list[dict[str, Any]] = [{"name": "as the model has", "kv_heads": None}]
    if any(group.v_head_dim for group in plan.geometry.groups):
        for kv_heads in sorted({heads, 8, 4, 2, 1}, reverse=True):
            if kv_heads <= heads and heads % kv_heads == 0:
                kind = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
                found.append({"name": f"{kv_heads} ({kind})", "kv_heads": kv_heads})
    return found


def _read_shares(plan: Plan) -> list[dict[str, float]]:
    """Parts of the weights that a step reads, those of experts by how many of them are used."""
    found: dict[tuple[int, int], int] = {}
    for tensor in plan.geometry.read_tensors:
        key = (tensor.copies, tensor.used)
        found[key] = found.get(key, 0) + tensor.parameters
    total = max(1, plan.geometry.parameters)
    return [{"share": count / total, "copies": copies, "used": used} for (copies, used), count in found.items()]


def _figures(plan: Plan) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(figure.name)}</th>'
        f"<td>{escape(show(figure))}</td><td>{escape(figure.formula)}</td></tr>"
        for figure in figures_of(plan)
    )
    return f"<table><thead><tr><th>figure</th><th>value</th><th>formula</th></tr></thead><tbody>{rows}</tbody></table>"


def _tables(comparisons: Comparisons) -> str:
    found = []
    for name, rows in comparisons.tables().items():
        listed = rows if isinstance(rows, list) else [rows]
        if listed:
            title = escape(TITLES[name])
            found.append(
                f'<details><summary>{title}</summary><div class="wide" tabindex="0" role="region" '
                f'aria-label="{title}">{_table(listed)}</div></details>'
            )
    return "\n".join(found)


def _table(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f'<th scope="col">{escape(heading(name))}</th>' for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell_text(name, row.get(name)))}</td>" for name in names) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
