"""`octavo compress`: fewer heads, fewer bits, fewer tokens for a model and a memory. It joins planner and measures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.flags import bytes_option
from octavo.cli.text_file import read_text, text_option
from octavo.errors import ConfigError, OctavoError

if TYPE_CHECKING:
    from octavo.cli.compress_measure import Measures
    from octavo.planner.compression import Comparison
    from octavo.planner.compression_quality import Measured
    from octavo.planner.plan import PlanRequest

SCENARIOS = ("chat", "document", "agents")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_MAX_CONTEXT = 1 << 30


def parse_tokens(text: str) -> int:
    """`32K` (of 1,024), `1M`, `4096`. Raises click.BadParameter."""
    match = re.fullmatch(r"\s*(\d+)\s*([kKmM]?)\s*", text)
    count = 0 if match is None else int(match[1]) * _UNITS[match[2].lower()]
    if match is None or not 1 <= count <= _MAX_CONTEXT:
        raise click.BadParameter(f"{text!r} is no number of tokens from 1 to 1024M; write 32K (of 1,024) or 32768")
    return count


@click.command()
@click.argument("model")
@click.option(
    "--context",
    type=parse_tokens,
    metavar="TOKENS",
    help="Tokens of a request, prompt and answer: 32K, 4096. [default: 4096 or the model's own]",
)
@bytes_option("--memory", help="Memory of the device, weights included: 8GiB.")
@click.option("--gpu", "--hardware", "hardware", metavar="NAME", help="A device of the catalogue instead of --memory.")
@bytes_option("--kv-cache-memory", help="Bytes of the cache itself instead.")
@click.option("--requests", type=click.IntRange(1), default=1, show_default=True, help="As many have to fit at once.")
@click.option(
    "--scenario", type=click.Choice(SCENARIOS), multiple=True, help="Recommend for this one only; may be repeated."
)
@click.option("--weights-dtype", default="auto", show_default=True, help="As for `octavo plan`.")
@click.option("--kv-cache-dtype", default="auto", show_default=True, help="The cache to begin from.")
@click.option("--block-size", type=click.IntRange(1), help="Tokens of a block. [default: 16]")
@click.option("--measure", is_flag=True, help="Run the model on a text and measure each format against f32.")
@text_option("For --measure. [default: a page of plain English]")
@click.option(
    "--text-tokens", type=click.IntRange(2), default=512, show_default=True, help="How much of it is used, at most."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compress(model: str, as_json: bool, **values: Any) -> None:
    """Three ways to a smaller KV cache for MODEL: fewer heads, fewer bits, fewer tokens; and which to take.

    MODEL is as for `octavo plan`; no weights are read unless --measure asks for it.
    """
    from octavo.planner.compression import compare
    from octavo.planner.compression_advice import advise
    from octavo.planner.compression_quality import known_evidence
    from octavo.planner.compression_report import Compression, compression_json, compression_text
    from octavo.planner.sources import open_geometry

    if values["text_file"] is not None and not values["measure"]:
        raise click.UsageError("--text is what --measure reads; give both")
    comparison = compare(open_geometry(model), request_of(values))
    measures = measures_of(model, comparison, values)
    measured, notes = (
        certified(model, comparison.plan.weights_dtype) if measures is None else (measures.formats, measures.notes)
    )
    wanted = values["requests"]
    found = Compression(
        comparison,
        tuple(advise(comparison, one, wanted, measured) for one in values["scenario"] or SCENARIOS),
        known_evidence(f"{model} {comparison.plan.geometry.model}"),
        measured,
        wanted,
        () if measures is None else tuple(measures.likelihoods),
        (*comparison.plan.notes, *notes),
    )
    click.echo(json.dumps(compression_json(found), indent=2) if as_json else compression_text(found))


def request_of(values: dict[str, Any]) -> PlanRequest:
    from octavo.planner.plan import PlanRequest
    from octavo.replay.hardware import find_hardware

    hardware = None if values["hardware"] is None else find_hardware(values["hardware"])
    given = [flag for flag in ("memory", "hardware", "kv_cache_memory") if values[flag] is not None]
    if len(given) != 1:
        what = "nothing says how much memory there is" if not given else "they say the same in different ways"
        raise click.UsageError(f"{what}: give one of --memory, --hardware and --kv-cache-memory")
    return PlanRequest(
        context=values["context"],
        kv_cache_dtype=values["kv_cache_dtype"],
        weights_dtype=values["weights_dtype"],
        block_size=values["block_size"],
        memory_bytes=values["memory"] if hardware is None else hardware.memory_bytes,
        kv_cache_memory=values["kv_cache_memory"],
        hardware=hardware,
    )


def measures_of(model: str, comparison: Comparison, values: dict[str, Any]) -> Measures | None:
    """What --measure asks for."""
    if not values["measure"]:
        return None
    from octavo.cli.compress_measure import measure
    from octavo.cli.model_cache import resolve_model
    from octavo.cli.sample_text import SAMPLE_TEXT

    file, num_tokens = values["text_file"], values["text_tokens"]
    text = SAMPLE_TEXT if file is None else read_text(file, num_tokens)
    return measure(resolve_model(model), comparison, text, num_tokens)


def certified(model: str, weights_dtype: str) -> tuple[tuple[Measured, ...], list[str]]:
    """What the newest certificate of the model's files says of each format; and which were passed over, and why."""
    from octavo.cli.model_cache import cache_dir
    from octavo.executor.certificate import found_files, read_certificate
    from octavo.models.loader import open_model
    from octavo.planner.compression_quality import of_certificate

    path = _local(model)
    files = [] if path is None else found_files(path, cache_dir())
    if path is None or not files:
        return (), []
    notes, found = [], []
    try:
        digest = open_model(path).digest
    except OctavoError as error:
        return (), [f"certificates were passed over, as the model cannot be opened: {error}"]
    for file in files:
        try:
            certificate = read_certificate(file)
        except ConfigError as error:
            notes.append(f"passed over: {error}")
            continue
        if certificate.model_digest == digest and certificate.weights_dtype == weights_dtype:
            found.append(certificate)
        elif certificate.model_digest == digest:
            notes.append(
                f"the certificate {file} is for weights in {certificate.weights_dtype}, not in {weights_dtype}"
            )
        else:
            notes.append(f"the certificate {file} is of another model (digest {certificate.model_digest[:12]})")
    if not found:
        return (), notes
    newest = max(found, key=lambda one: one.created).path
    return of_certificate(json.loads(newest.read_bytes()), newest.name), notes


def _local(model: str) -> Path | None:
    """The files of a model that is here."""
    from octavo.cli.model_cache import cache_dir
    from octavo.models.hub import list_models

    path = Path(model).expanduser()
    if path.exists():
        return path if path.suffix != ".json" else path.parent
    return {one.name: one.path for one in list_models(cache_dir())}.get(model)
