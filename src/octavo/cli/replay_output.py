"""What `octavo replay` found, to the terminal, as JSON, as pictures and as a page. It does not know the modes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.replay.cache_report import Table
    from octavo.replay.plot import Plot


@dataclass(frozen=True, slots=True)
class Found:
    title: str
    json: dict[str, Any]
    tables: Sequence[Table]
    plots: Sequence[Plot] = ()


@dataclass(frozen=True, slots=True)
class OutputFlags:
    as_json: bool
    plot: Path | None
    html: Path | None


def check_output(flags: OutputFlags) -> None:
    """Raises ConfigError for a picture of an unknown kind, before anything slow is done."""
    if flags.plot is not None and flags.plot.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"--plot is {flags.plot}; its name must end in .svg or .png")


def show(found: Found, flags: OutputFlags) -> None:
    from octavo.replay.pages import html_page, table_text

    if flags.plot is not None:
        _write_plot(found, flags.plot)
    if flags.html is not None:
        flags.html.write_text(html_page(found.title, found.tables, found.plots), encoding="utf-8")
    if flags.as_json:
        click.echo(json.dumps(found.json))
    else:
        click.echo("\n\n".join(table_text(table) for table in found.tables))


def _write_plot(found: Found, path: Path) -> None:
    from octavo.replay.plot import svg

    if not found.plots:
        raise ConfigError("this mode has no picture; leave --plot out")
    plot = found.plots[0]
    if path.suffix.lower() == ".svg":
        path.write_text(svg(plot), encoding="utf-8")
        return
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise ConfigError("a PNG needs matplotlib: pip install matplotlib, or give a name that ends in .svg") from error
    figure, axes = pyplot.subplots(figsize=(7.6, 4.2))
    for line in plot.lines:
        axes.plot(line.x, line.y, label=line.name)
    axes.set(title=plot.title, xlabel=plot.x_name, ylabel=plot.y_name, ylim=(0, None))
    if plot.log_x:
        axes.set_xscale("log")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
