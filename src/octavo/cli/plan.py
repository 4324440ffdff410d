"""`octavo plan`: what a model's weights and cache need and what fits, before anything is bought or started.

It reads flags, asks the planner and prints; it computes nothing itself, and loads no weights and no kernels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.flag_table import parse_layers
from octavo.cli.units import parse_bytes
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.planner.comparisons import Comparisons
    from octavo.planner.plan import Plan, PlanRequest

TABLES = (
    "by_context by_batch formats windows heads tensor_parallel pipeline_parallel recompute contiguous prefix_sharing"
).split()
DEFAULT_TABLES = ("by_context", "formats")


def _bytes(text: str) -> int:
    """`40GiB`, `80GB`, a plain number."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _layers(text: str) -> tuple[int, ...]:
    try:
        return parse_layers(text) if text else ()
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _numbers(function: Any) -> Any:
    for flag, help_text in (
        ("--parameters", "With plain numbers: how many parameters, for weights and speed."),
        ("--window", "With plain numbers: tokens that a layer sees."),
        ("--hidden-size", "With plain numbers: numbers of a hidden state."),
        ("--heads", "With plain numbers: attention heads. [default: as many as KV heads]"),
        ("--head-dim", "Instead of MODEL: numbers of a head."),
        ("--kv-heads", "Instead of MODEL: KV heads of a layer."),
        ("--layers", "Instead of MODEL: layers."),
    ):
        function = click.option(flag, type=click.IntRange(1), help=help_text)(function)
    return function


@click.command()
@click.argument("model", required=False)
@_numbers
@click.option("--treat-as", metavar="FAMILY", help="Read an architecture that is not known as this family.")
@click.option(
    "--context",
    "--max-model-len",
    "context",
    type=click.IntRange(1),
    help="Tokens of a sequence. [default: 4096 or the model's own]",
)
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences side by side.")
@click.option("--kv-cache-dtype", default="auto", show_default=True, help="auto, f32, bf16, f16, fp8, q8_0, q4_0, ...")
@click.option(
    "--kv-cache-dtype-skip-layers",
    "skip_layers",
    type=_layers,
    default="",
    metavar="LAYERS",
    help="Layers that stay as auto would have them: 0-3,7.",
)
@click.option("--weights-dtype", default="auto", show_default=True, help="auto, f32, bf16, fp8, int4-128, ...")
@click.option("--block-size", type=click.IntRange(1), help="Tokens of a block. [default: the engine's own]")
@click.option(
    "--engine", default="octavo", show_default=True, help="octavo (exact), vllm, sglang or llama.cpp (modelled)."
)
@click.option("--memory", type=_bytes, metavar="BYTES", help="Memory of one device: 16GiB, 80GB.")
@click.option("--gpu", "--hardware", "hardware", metavar="NAME", help="A device of the catalogue, such as A100-40GB.")
@click.option(
    "--gpu-memory-utilization", type=float, help="Part of the memory that is used. [default: the engine's own]"
)
@click.option(
    "--overhead", type=_bytes, metavar="BYTES", default=None, help="Memory set aside for activations and graphs."
)
@click.option(
    "--kv-cache-memory", type=_bytes, metavar="BYTES", help="Bytes of the cache itself, as for `octavo serve`."
)
@click.option("--tensor-parallel-size", type=int, default=1, show_default=True, help="Ranks that share each layer.")
@click.option("--pipeline-parallel-size", type=int, default=1, show_default=True, help="Stages of whole layers.")
@click.option("--users", type=click.IntRange(1), default=100, show_default=True, help="Users of one shared prefix.")
@click.option("--prefix-tokens", type=click.IntRange(1), default=2000, show_default=True, help="Tokens of that prefix.")
@click.option("--lengths", type=click.Path(path_type=Path), help="CSV of prompt and output tokens of real requests.")
@click.option("--all", "everything", is_flag=True, help="Show every table.")
@click.option("--explain", is_flag=True, help="Show each figure's formula with the numbers put in.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write charts to this .svg or .png file as well.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a report with sliders to this file as well.")
@click.option("--list-hardware", is_flag=True, help="Show the catalogue of hardware with its sources, and end.")
def plan(model: str | None, as_json: bool, as_csv: bool, list_hardware: bool, **values: Any) -> None:
    """What MODEL needs and what fits, computed from its config alone.

    MODEL is a directory, a config.json, a .gguf file, a short name (llama-2-7b, smollm2, ...) or a hub id. No weights
    are read. Without MODEL, give --layers, --kv-heads and --head-dim.
    """
    if list_hardware:
        click.echo("\n".join(hardware_lines()))
        return
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other")
    made, comparisons = plan_of(model, values)
    if values["plot"] is not None:
        from octavo.planner.plots import write_plot

        write_plot(made, values["plot"])
    if values["html"] is not None:
        from octavo.planner.html_report import html_report

        write_text(values["html"], html_report(made, comparisons), "--html")
    if as_json:
        from octavo.planner.report import report

        click.echo(json.dumps(report(made, comparisons, explain=values["explain"]), indent=2))
    elif as_csv:
        from octavo.planner.report import as_csv as csv_text

        click.echo(csv_text(made, comparisons), nl=False)
    else:
        from octavo.planner.tables import plan_text

        shown = (*TABLES, "lengths") if values["everything"] else (*DEFAULT_TABLES, "lengths")
        click.echo(plan_text(made, comparisons, explain=values["explain"], wide=shown))


def plan_of(model: str | None, values: dict[str, Any]) -> tuple[Plan, Comparisons]:
    """The plan that the flags ask for, and the tables beside it."""
    from octavo.planner.comparisons import Comparisons, Shared
    from octavo.planner.lengths import read_lengths
    from octavo.planner.plan import make_plan
    from octavo.planner.sources import Numbers, geometry_of_numbers, open_geometry

    numbers = Numbers(
        **{
            name: values[name]
            for name in ("layers", "kv_heads", "head_dim", "heads", "hidden_size", "parameters", "window")
        }
    )
    if (model is None) == (not numbers.given):
        raise click.UsageError("give either MODEL or plain numbers (--layers --kv-heads --head-dim)")
    geometry = geometry_of_numbers(numbers) if model is None else open_geometry(model, treat_as=values["treat_as"])
    made = make_plan(geometry, request_of(values))
    lengths = None if values["lengths"] is None else read_lengths(values["lengths"])
    return made, Comparisons(made, Shared(values["users"], values["prefix_tokens"]), lengths)


def request_of(values: dict[str, Any]) -> PlanRequest:
    from octavo.planner.plan import PlanRequest
    from octavo.replay.hardware import find_hardware

    hardware = None if values["hardware"] is None else find_hardware(values["hardware"])
    if hardware is not None and values["memory"] is not None:
        raise ConfigError("--memory and --gpu both say how much memory there is; give one of them")
    return PlanRequest(
        engine=values["engine"],
        context=values["context"],
        batch=values["batch"],
        kv_cache_dtype=values["kv_cache_dtype"],
        weights_dtype=values["weights_dtype"],
        block_size=values["block_size"],
        memory_bytes=values["memory"] if hardware is None else hardware.memory_bytes,
        memory_share=values["gpu_memory_utilization"],
        overhead_bytes=values["overhead"] or 0,
        kv_cache_memory=values["kv_cache_memory"],
        ranks=(values["tensor_parallel_size"], values["pipeline_parallel_size"]),
        hardware=hardware,
        skip_layers=values["skip_layers"],
    )


def write_text(path: Path, text: str, flag: str) -> None:
    """Raises ConfigError, with the flag's name, where the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written ({error.strerror}); give another place") from error


def hardware_lines() -> list[str]:
    from octavo.replay.hardware import CATALOGUE

    head = f"{'name':<18} {'memory GB':>9} {'GB/s':>7} {'16-bit TFLOPS':>13}  source"
    return [
        head,
        *(
            f"{each.name:<18} {each.memory_bytes / 1e9:>9.0f} {each.bytes_per_s / 1e9:>7.0f} "
            f"{each.flops_per_s / 1e12:>13.1f}  {each.source}"
            for each in CATALOGUE
        ),
    ]
