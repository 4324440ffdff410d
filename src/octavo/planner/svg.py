"""Writes a drawing as SVG. It knows no charts."""

from __future__ import annotations

from html import escape

from octavo.planner.chart import Drawing, Line, Words


def as_svg(drawing: Drawing) -> str:
    """A document of its own, with its title for readers of screens."""
    title = next((part.text for part in drawing.parts if isinstance(part, Words)), "chart")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {drawing.width} {drawing.height}" '
        f'width="{drawing.width}" height="{drawing.height}" role="img" font-family="sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{drawing.width}" height="{drawing.height}" fill="#ffffff"/>',
    ]
    lines += [_line(part) if isinstance(part, Line) else _words(part) for part in drawing.parts]
    return "\n".join([*lines, "</svg>", ""])


def _line(line: Line) -> str:
    dash = ' stroke-dasharray="6 4"' if line.is_dashed else ""
    (x1, y1), (x2, y2) = line.start, line.end
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{line.colour}" '
        f'stroke-width="{line.width:g}"{dash}/>'
    )


def _words(words: Words) -> str:
    x, y = words.at
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{words.size}" fill="{words.colour}" '
        f'text-anchor="{words.anchor}">{escape(words.text)}</text>'
    )
