"""Line charts as plain lines and words, which `svg` and `png` then draw. Logarithmic axes. It does not know plans."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

COLOURS = ("#1f6fb4", "#c8501e", "#2f8f4e", "#8a4fb0", "#b08a00", "#5a6672")
INK, FAINT = "#20262d", "#d5dae0"
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 24, 40, 56


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: tuple[tuple[float, float], ...]  # all above zero
    is_level: bool = False  # a bound or a budget: drawn dashed


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x_name: str
    y_name: str
    series: tuple[Series, ...]
    show_x: Callable[[float], str]
    show_y: Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Line:
    start: tuple[float, float]
    end: tuple[float, float]
    colour: str
    width: float = 1.0
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Words:
    at: tuple[float, float]  # of the middle of the baseline's start, middle or end
    text: str
    size: int
    anchor: str = "start"
    colour: str = INK


@dataclass(frozen=True, slots=True)
class Drawing:
    width: int
    height: int
    parts: tuple[Line | Words, ...]


def draw(charts: Sequence[Chart], width: int = 640, height: int = 400) -> Drawing:
    """The charts below each other."""
    parts: list[Line | Words] = []
    for index, chart in enumerate(charts):
        parts += _draw_one(chart, width, height, height * index)
    return Drawing(width, height * len(charts), tuple(parts))


def _draw_one(chart: Chart, width: int, height: int, top: int) -> list[Line | Words]:
    points = [point for series in chart.series for point in series.points]
    x_ends = _ends([x for x, _ in points])
    y_ends = _ends([y for _, y in points])
    inner_width, inner_height = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def place(point: tuple[float, float]) -> tuple[float, float]:
        right = (math.log(point[0]) - math.log(x_ends[0])) / (math.log(x_ends[1]) - math.log(x_ends[0]))
        up = (math.log(point[1]) - math.log(y_ends[0])) / (math.log(y_ends[1]) - math.log(y_ends[0]))
        return _LEFT + right * inner_width, top + _TOP + (1 - up) * inner_height

    parts: list[Line | Words] = [Words((_LEFT, top + 22), chart.title, 15)]
    for x in _ticks(*x_ends):
        parts.append(Line(place((x, y_ends[0])), place((x, y_ends[1])), FAINT))
        right, down = place((x, y_ends[0]))
        parts.append(Words((right, down + 16), chart.show_x(x), 11, "middle"))
    for y in _ticks(*y_ends):
        parts.append(Line(place((x_ends[0], y)), place((x_ends[1], y)), FAINT))
        left, down = place((x_ends[0], y))
        parts.append(Words((left - 6, down + 4), chart.show_y(y), 11, "end"))
    parts.append(Words((_LEFT + inner_width / 2, top + height - 20), f"{chart.x_name}; {chart.y_name}", 11, "middle"))
    along = float(_LEFT)
    for index, series in enumerate(chart.series):
        colour = COLOURS[index % len(COLOURS)]
        placed = [place(point) for point in series.points]
        parts += [Line(one, other, colour, 2.0, series.is_level) for one, other in itertools.pairwise(placed)]
        parts.append(Line((along, top + height - 8), (along + 18, top + height - 8), colour, 2.0, series.is_level))
        parts.append(Words((along + 22, top + height - 4), series.name, 11, colour=colour))
        along += 34 + 7.0 * len(series.name)
    return parts


def _ends(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low * 1.001 else (low / 2, high * 2)


def _ticks(low: float, high: float) -> list[float]:
    """Powers of two, at most eight of them."""
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    step = max(1, -(-(last - first + 1) // 8))
    return [2.0**power for power in range(first, last + 1, step)]
