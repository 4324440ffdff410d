"""Tables as text for the terminal and, with plots, as one HTML page that needs no network. It computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from octavo.replay.cache_report import Table
from octavo.replay.plot import Plot, svg

_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}"
    "td,th{border-bottom:1px solid #ddd;padding:.25rem .75rem;text-align:right}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}"
)


def table_text(table: Table) -> str:
    """Columns side by side, the first to the left and the others to the right."""
    rows = [table.columns, *table.rows] if any(table.columns) else list(table.rows)
    widths = [max((len(row[at]) for row in rows), default=0) for at in range(len(table.columns))]
    is_pairs = len(table.columns) == 2 and not any(table.columns)
    lines = [table.title, "-" * len(table.title)]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell if is_pairs else cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def html_page(title: str, tables: Sequence[Table], plots: Sequence[Plot]) -> str:
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        *(svg(plot) for plot in plots),
    ]
    for table in tables:
        parts.append(f"<h2>{escape(table.title)}</h2><table>")
        if any(table.columns):
            parts.append("<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in table.columns) + "</tr>")
        parts += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows]
        parts.append("</table>")
    return "\n".join([*parts, "</body></html>\n"])
