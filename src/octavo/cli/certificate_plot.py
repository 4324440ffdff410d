"""The plot of a certification: bytes a token against how far answers move, and the settings that none beats in both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.planner.chart import COLOURS, FAINT, INK, Drawing, Line, Words
from octavo.planner.plots import write_drawing

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 460, 84, 130, 48, 56
_LEAST_KL = 1e-6


def write_plot(report: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError where it cannot be written."""
    write_drawing(draw(report), path)


def pareto(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows than which no other has both fewer bytes and less divergence, smallest first."""
    found: list[Mapping[str, Any]] = []
    for row in sorted(report["rows"], key=lambda one: (one["bytes_per_token"], one["kl_mean"])):
        if not found or row["kl_mean"] < found[-1]["kl_mean"]:
            found.append(row)
    return found


def draw(report: Mapping[str, Any]) -> Drawing:
    rows = report["rows"]
    most_bytes = max((row["bytes_per_token"] for row in rows), default=1) * 1.05
    values = [max(row["kl_mean"], _LEAST_KL) for row in rows] + [report["max_kl"]]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)

    def place(num_bytes: float, kl: float) -> tuple[float, float]:
        up = (math.log10(max(kl, _LEAST_KL)) - low) / max(high - low, 1)
        inner = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + num_bytes / most_bytes * inner[0], _TOP + (1 - up) * inner[1]

    parts: list[Line | Words] = [Words((_LEFT, 26), "KV formats: bytes a token and divergence from f32", 15)]
    for power in range(low, high + 1):
        start, end = place(0, 10**power), place(most_bytes, 10**power)
        parts += [Line(start, end, FAINT), Words((start[0] - 6, start[1] + 4), f"{10.0**power:g}", 11, "end")]
    for part in range(5):
        along = place(most_bytes / 1.05 * part / 4, 10**low)
        parts.append(Words((along[0], along[1] + 16), f"{most_bytes / 1.05 * part / 4:,.0f}", 11, "middle"))
    parts.append(
        Words((_LEFT, _HEIGHT - 16), "bytes a token; mean KL in nats; dashed: the limit; green: certified", 11)
    )
    limit = place(0, report["max_kl"]), place(most_bytes, report["max_kl"])
    parts.append(Line(*limit, COLOURS[1], 1.5, is_dashed=True))
    front = [place(row["bytes_per_token"], row["kl_mean"]) for row in pareto(report)]
    parts += [Line(one, other, COLOURS[0], 2.0) for one, other in itertools.pairwise(front)]
    for row in rows:
        x, y = place(row["bytes_per_token"], row["kl_mean"])
        colour = COLOURS[2] if row["certified"] else INK
        parts += [Line((x - 4, y), (x + 4, y), colour, 2.5), Line((x, y - 4), (x, y + 4), colour, 2.5)]
        parts.append(Words((x + 7, y - 4), row["format"], 11, colour=colour))
    return Drawing(_WIDTH, _HEIGHT, tuple(parts))
