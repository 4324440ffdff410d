"""Lines in a picture, as SVG text. No library, no file; it does not know what the lines are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 40, 56
_COLOURS = ("#1668a8", "#c4501b", "#2b8a3e", "#8a3ea8", "#777777", "#b08900")


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    x_name: str
    y_name: str
    lines: tuple[Line, ...]
    log_x: bool = False


def svg(plot: Plot) -> str:
    """A picture of its own, which needs no network."""
    x_range = _range([value for line in plot.lines for value in line.x], log=plot.log_x)
    y_range = _range([0.0, *(value for line in plot.lines for value in line.y)], log=False)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(plot.title, quote=True)}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(plot.title)}</text>',
    ]
    for value in _ticks(*x_range, log=plot.log_x):
        at = _x(value, x_range, plot.log_x)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{_short(value)}</text>')
    for value in _ticks(*y_range, log=False):
        at = _y(value, y_range)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{_short(value)}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(plot.x_name)}</text>')
    parts.append(
        f'<text x="18" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 18 {HEIGHT / 2})">'
        f"{escape(plot.y_name)}</text>"
    )
    for index, line in enumerate(plot.lines):
        colour = _COLOURS[index % len(_COLOURS)]
        points = " ".join(
            f"{_x(x, x_range, plot.log_x):.1f},{_y(y, y_range):.1f}" for x, y in zip(line.x, line.y, strict=True)
        )
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>')
        parts.append(f'<text x="{_LEFT + 12}" y="{_TOP + 16 + 16 * index}" fill="{colour}">{escape(line.name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _range(values: Sequence[float], *, log: bool) -> tuple[float, float]:
    found = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = min(found, default=1.0), max(found, default=2.0)
    return (low, high) if high > low else (low, low * 2 if low > 0 else 1.0)


def _x(value: float, span: tuple[float, float], log: bool) -> float:
    low, high = span
    share = math.log(max(value, low) / low) / math.log(high / low) if log else (value - low) / (high - low)
    return _LEFT + share * (WIDTH - _LEFT - _RIGHT)


def _y(value: float, span: tuple[float, float]) -> float:
    return HEIGHT - _BOTTOM - (value - span[0]) / (span[1] - span[0]) * (HEIGHT - _TOP - _BOTTOM)


def _ticks(low: float, high: float, *, log: bool) -> list[float]:
    if log:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        return [10.0**power for power in range(first, last + 1)]
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 6)
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
