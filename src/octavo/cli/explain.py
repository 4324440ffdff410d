"""`octavo explain`: short walks through how a KV cache works, with the numbers of a model and what this machine does.

It chooses where a walk takes place, a loaded model or the core alone, and measures; what is told, the planner knows.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from octavo.planner.plan import Plan
    from octavo.planner.walks.blocks import Ground
    from octavo.planner.walks.walk import Walk

TOPICS = ("phases", "recompute", "memory", "paging", "sharing", "radix", "compression")
DEFAULT_MODEL = "smollm2"
MEASURED = ("phases", "recompute")  # what is measured where the model is here
WATCHED = ("paging", "sharing", "radix")  # what is watched at work


@click.command()
@click.argument("topic", type=click.Choice(TOPICS))
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--context", type=click.IntRange(1), help="Tokens of a sequence. [default: 4096 or the model's own]")
@click.option("--gpu", "--hardware", "hardware", metavar="NAME", help="A device of the catalogue, for its bounds.")
@click.option("--live/--no-live", default=None, help="Run the model. [default: where it is here and can be run]")
@click.option("--html", type=click.Path(path_type=Path), help="Write the walk to this page instead.")
def explain(
    topic: str, model: str, context: int | None, hardware: str | None, live: bool | None, html: Path | None
) -> None:
    """Explain TOPIC with the numbers of MODEL: phases, recompute, memory, paging, sharing, radix or compression.

    MODEL is what `octavo plan` takes; smollm2 where none is given. Nothing is fetched unless --live asks for it.
    """
    from octavo.planner.walks.walk import as_html, as_text

    walk = make_walk(topic, model, context, hardware, live=live)
    if html is None:
        click.echo(as_text(walk))
        return
    from importlib.resources import files

    from octavo.cli.plan import write_text

    style = (files("octavo.planner") / "page" / "report.css").read_text(encoding="utf-8")
    write_text(html, as_html(walk, style), "--html")


def make_walk(topic: str, model: str, context: int | None, hardware: str | None, *, live: bool | None) -> Walk:
    """The walk; with the model at work where it is here, or where `live` asks for it."""
    from octavo.planner.plan import PlanRequest, make_plan
    from octavo.planner.sources import open_geometry
    from octavo.planner.walks import blocks, numbers
    from octavo.replay.hardware import find_hardware

    device = None if hardware is None else find_hardware(hardware)
    plan = make_plan(open_geometry(model), PlanRequest(context=context, hardware=device))
    runs = topic in (*MEASURED, *WATCHED) and (live if live is not None else _is_here(model, plan))
    if topic in WATCHED:
        ground = _live_ground(model) if runs else _stand_in()
        told = {"paging": blocks.paging, "sharing": blocks.sharing, "radix": blocks.radix}[topic]
        return told(plan, ground)
    if topic == "memory":
        return numbers.memory(plan)
    if topic == "compression":
        return numbers.compression(plan)
    from octavo.cli import measuring

    if topic == "phases":
        return numbers.phases(plan, measuring.measure_phases(model) if runs else None)
    return numbers.recompute(plan, measuring.measure_recompute(model) if runs else None)


def _is_here(model: str, plan: Plan) -> bool:
    """Whether the model could be run now, with nothing to fetch."""
    from octavo.cli.model_cache import cache_dir
    from octavo.models.hub import list_models

    if not plan.is_exact:
        return False
    path = Path(model)
    if path.is_file():
        return path.suffix == ".gguf"
    if path.is_dir():
        return any(path.glob("*.safetensors")) or any(path.glob("*.gguf"))
    return any(entry.name == model and entry.complete for entry in list_models(cache_dir()))


def _stand_in() -> Ground:
    from octavo.planner.walks.blocks import Ground, stand_in_encode
    from octavo.planner.walks.trace import stand_in_core

    return Ground(stand_in_core(), stand_in_encode, is_live=False)


def _live_ground(model: str) -> Ground:
    from octavo.cli.measuring import load_small
    from octavo.planner.walks.blocks import Ground

    loaded = load_small(model)
    return Ground(loaded.core, lambda text: loaded.tokenizer.encode(text, add_special_tokens=False), is_live=True)
