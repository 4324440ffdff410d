"""`octavo calibrate`: scales for an 8-bit cache. It does not know how they are found, nor their file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from octavo.cli.flags import config_from, flags_of
from octavo.cli.model_flags import model_argument
from octavo.cli.text_file import text_option, token_ids_of
from octavo.executor.config import SCALABLE_FORMATS, SCALE_SCHEMES, SCALED_FORMATS, ExecutorConfig

_NO_USE = ("kv_cache_dtype", "kv_cache_skip_layers", "kv_cache_scales", "certificate", "kv_cache_memory", "block_size")


@click.command()
@model_argument
@text_option("A text like those that the model will read; .gz is unpacked.", required=True)
@click.option(
    "--format",
    "kv_format",
    type=click.Choice(SCALABLE_FORMATS),
    default=SCALED_FORMATS[0],
    show_default=True,
    help="For which --kv-cache-dtype the scales are.",
)
@click.option(
    "--scheme",
    type=click.Choice(SCALE_SCHEMES),
    default=SCALE_SCHEMES[0],
    show_default=True,
    help="hadamard: scales of channels of K by what errors there cost, and heads turned before they are rounded. Of "
    "fp8 also one scale for each KV head, or for each channel of it, without the turn.",
)
@click.option("--tokens", type=click.IntRange(2), default=4096, show_default=True, help="Tokens of the text, at most.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where the scales go. [default: beside the model, where they are found]",
)
@flags_of(ExecutorConfig, without=_NO_USE)
def calibrate(
    model: str, text_file: Path, kv_format: str, scheme: str, tokens: int, output: Path | None, **values: Any
) -> None:
    """Find scales for MODEL's K and V in fp8 or int8, on a text, and keep them beside the model.

    `--kv-cache-dtype fp8_e4m3` (or fp8_e5m2, or int8) then uses them. MODEL is a directory, a .gguf file, an alias
    such as smollm2, or a hub id.
    """
    from octavo.certify.calibration import CalibrationAsk
    from octavo.certify.calibration import calibrate as find_scales
    from octavo.cli.model_cache import resolve_model
    from octavo.cli.progress import progress_bar
    from octavo.cli.versions import octavo_version
    from octavo.engine.tokenizer import Tokenizer
    from octavo.executor.kv_scales import default_scales_path, write_scales
    from octavo.kernels.native import NativeOps
    from octavo.models.loader import load_model, open_model
    from octavo.models.packed_size import resolve_weights_dtype

    config = config_from(ExecutorConfig, values)
    source = open_model(resolve_model(model))
    token_ids = token_ids_of(Tokenizer.from_source(source.tokenizer_source), text_file, tokens)
    path = output or default_scales_path(source.path, kv_format)
    with progress_bar(f"loading {model}") as progress:
        dtype = resolve_weights_dtype(config.weights_dtype, source.config.dtype)
        loaded = load_model(source, NativeOps(config.threads, config.instruction_set), dtype, progress)
    scales = find_scales(loaded, token_ids, CalibrationAsk(kv_format, scheme, source.digest, octavo_version()))
    write_scales(path, scales)
    click.echo(
        f"calibrated {kv_format} by {scheme} on {scales.num_tokens} tokens: {len(scales.k)} layers, {scales.num_bytes} "
        f"bytes of scales, digest {scales.digest[:12]}\nwrote {path}"
    )
