"""A walk: a short text with tables, pictures of characters and charts, shown on a terminal or as an HTML page.

It does not know what it tells.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from octavo.planner.chart import Chart, draw
from octavo.planner.svg import as_svg
from octavo.planner.tables import cell_text, grid, heading

WIDTH = 100


@dataclass(frozen=True, slots=True)
class Words:
    text: str


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    rows: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Picture:
    """Lines of characters that stand below each other."""

    title: str
    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Graph:
    """A chart; on a terminal its points are left to the table beside it."""

    chart: Chart


Part = Words | Table | Picture | Graph


@dataclass(frozen=True, slots=True)
class Walk:
    title: str
    parts: tuple[Part, ...]


def as_text(walk: Walk) -> str:
    """For a terminal."""
    lines = [walk.title, "=" * len(walk.title)]
    for part in walk.parts:
        if isinstance(part, Words):
            lines += ["", *textwrap.wrap(part.text, WIDTH)]
        elif isinstance(part, Table):
            lines += ["", part.title, *(f"  {line}" for line in grid(part.rows))]
        elif isinstance(part, Picture):
            lines += ["", part.title, *(f"  {line}" for line in part.lines)]
    return "\n".join(lines)


def as_html(walk: Walk, style: str) -> str:
    """A page of its own that needs no network; `style` is its sheet."""
    body = "\n".join(_part(part) for part in walk.parts)
    title = escape(walk.title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n{body}\n"
        "</main>\n</body>\n</html>\n"
    )


def _part(part: Part) -> str:
    if isinstance(part, Words):
        return f"<p>{escape(part.text)}</p>"
    if isinstance(part, Graph):
        return as_svg(draw([part.chart]))
    title = escape(part.title)
    if isinstance(part, Picture):
        inner = f"<pre>{escape(chr(10).join(part.lines))}</pre>"
        return f'<h2>{title}</h2><div class="wide" tabindex="0" role="region" aria-label="{title}">{inner}</div>'
    names = list(dict.fromkeys(key for row in part.rows for key in row))
    head = "".join(f'<th scope="col">{escape(heading(name))}</th>' for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell_text(name, row.get(name)))}</td>" for name in names) + "</tr>"
        for row in part.rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<h2>{title}</h2><div class="wide" tabindex="0" role="region" aria-label="{title}">{table}</div>'
