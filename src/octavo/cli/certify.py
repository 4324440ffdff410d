"""`octavo certify`: which KV formats may be used for a model, by the user's own text. It does not measure itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.certify.limits import Limits
from octavo.cli.flags import config_from, flags_of
from octavo.cli.model_flags import model_argument
from octavo.cli.text_file import text_option, token_ids_of
from octavo.core.kv_bytes import FORMAT_BYTES
from octavo.errors import ConfigError
from octavo.executor.config import HADAMARD, SCALABLE_FORMATS, ExecutorConfig

if TYPE_CHECKING:
    from octavo.certify.certification import Ask
    from octavo.certify.report import About
    from octavo.engine.tokenizer import Tokenizer
    from octavo.executor.kv_scales import KVScales
    from octavo.kernels.native import NativeOps
    from octavo.models.family import CausalLM
    from octavo.models.loader import ModelSource

FORMATS = tuple(name for name in FORMAT_BYTES if name != "f32")
CALIBRATION_TOKENS = 4096
_LIMITS = Limits()
_NO_USE = (
    "kv_cache_dtype",
    "kv_cache_skip_layers",
    "kv_cache_scales",
    "certificate",
    "kv_cache_memory",
    "block_size",
)


def _formats(text: object) -> tuple[str, ...]:
    names = tuple(part.strip() for part in str(text).split(",") if part.strip())
    wrong = [name for name in names if name not in FORMATS]
    if wrong or not names:
        raise click.BadParameter(f"{(wrong or [''])[0]!r} is none of {', '.join(FORMATS)}")
    return names


@click.command()
@model_argument
@text_option("A text like those that the model will read; .gz is unpacked.", required=True)
@click.option(
    "--max-kl", type=float, default=_LIMITS.max_kl, show_default=True, help="Mean divergence, in nats, at most."
)
@click.option(
    "--min-top1",
    type=float,
    default=_LIMITS.min_top1,
    show_default=True,
    help="Share of equal most likely tokens, at least.",
)
@click.option(
    "--max-needle-loss",
    type=float,
    default=_LIMITS.max_needle_loss,
    show_default=True,
    help="Share of the needles that may be lost.",
)
@click.option(
    "--formats",
    type=_formats,
    default=",".join(FORMATS),
    metavar="NAMES",
    help="Which are measured, separated by commas. [default: all]",
)
@click.option("--mixes/--no-mixes", default=True, show_default=True, help="Look for layers to leave out of a format.")
@click.option("--tokens", type=click.IntRange(32), default=8192, show_default=True, help="Tokens of the text, at most.")
@click.option(
    "--max-model-len", type=click.IntRange(32), help="Longest text that is measured. [default: what there is]"
)
@click.option("--json", "as_json", is_flag=True, help="Print the certificate instead of a table.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where the certificate goes. [default: beside the model, where it is found]",
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Draw the result: .svg or .png."
)
@flags_of(ExecutorConfig, without=_NO_USE)
def certify(model: str, text_file: Path, as_json: bool, output: Path | None, plot: Path | None, **values: Any) -> None:
    """Measure on a text which KV formats change MODEL's answers little enough, and certify the smallest.

    `--kv-cache-dtype certified` then uses it. MODEL is a directory, a .gguf file, an alias such as smollm2, or a hub
    id. Every format runs beside an f32 cache: cold, after a prefix hit, batched, in chunks, and as one long text.
    """
    from octavo.certify.certification import certify as run
    from octavo.certify.report import as_report, table, verdict
    from octavo.cli.certificate_plot import write_plot
    from octavo.planner.plots import check_kind

    limits = Limits(values["max_kl"], values["min_top1"], values["max_needle_loss"])
    if plot is not None:
        check_kind(plot)
    opened = _open(model, values)
    ask = opened.ask(text_file, limits, values)
    found = run(opened.model, opened.ops, ask, say=lambda line: click.echo(f"octavo: {line}", err=True))
    report = as_report(found, ask, opened.about(), opened.ops)
    click.echo(json.dumps(report, indent=1) if as_json else "\n".join([*table(report), *verdict(report)]))
    path = _write(report, opened.source.path, output)
    click.echo(f"octavo: wrote {path}", err=True)
    if plot is not None:
        write_plot(report, plot)


@dataclass(frozen=True, slots=True)
class _Opened:
    source: ModelSource
    model: CausalLM
    ops: NativeOps
    tokenizer: Tokenizer
    weights_dtype: str

    def about(self) -> About:
        from octavo.certify.report import About
        from octavo.cli.versions import octavo_version

        return About(
            model_digest=self.source.digest,
            model_dtype=self.source.config.dtype,
            weights_dtype=self.weights_dtype,
            instruction_set=self.ops.instruction_set,
            octavo_version=octavo_version(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def ask(self, text_file: Path, limits: Any, values: dict[str, Any]) -> Ask:
        """The text, as long as it is used, and the scales of the formats that want some."""
        from octavo.certify.certification import Ask
        from octavo.models.config import check_context

        num_tokens, asked = values["tokens"], values["max_model_len"]
        every = token_ids_of(self.tokenizer, text_file, num_tokens + CALIBRATION_TOKENS)
        token_ids = every[:num_tokens]
        if asked is not None:
            check_context(self.source.config, asked)
            if len(token_ids) < asked - 1:
                raise ConfigError(
                    f"--max-model-len {asked} needs a text of {asked - 1} tokens, and --text {text_file} gives "
                    f"{len(token_ids)} of --tokens {num_tokens}; give more of both, or lower it"
                )
        # What follows the measured text; where nothing does, the text itself.
        other = every[num_tokens:] if len(every) >= num_tokens + 256 else token_ids[:CALIBRATION_TOKENS]
        scales = {name: self._scales(name, other) for name in values["formats"] if name in SCALABLE_FORMATS}
        return Ask(
            token_ids=token_ids,
            encode=lambda text: self.tokenizer.encode(text, add_special_tokens=False, namespace=""),
            formats=values["formats"],
            limits=limits,
            max_model_len=asked or min(self.source.config.max_position_embeddings, len(token_ids) + 1),
            scales={name: one for name, one in scales.items() if one is not None},
            clock=time.perf_counter,
            search_mixes=values["mixes"],
        )

    def _scales(self, kv_format: str, token_ids: Sequence[int]) -> KVScales | None:
        """Those that were kept for the model; else new ones, kept beside it or in the cache. None: it has none."""
        from octavo.certify.calibration import CalibrationAsk, calibrate
        from octavo.cli.model_cache import cache_dir
        from octavo.cli.versions import octavo_version
        from octavo.executor.kv_scales import read_scales, scales_paths, write_scales

        paths = scales_paths(self.source.path, kv_format, cache_dir())
        for path in paths:
            if path.exists():
                return read_scales(path, kv_format, self.source.digest)
        if any(group.kind != "pair" for group in self.model.kv_groups("f32")):
            return None
        asked = CalibrationAsk(kv_format, HADAMARD, self.source.digest, octavo_version())
        scales = calibrate(self.model, token_ids, asked)
        with suppress(OSError):
            paths[1].parent.mkdir(parents=True, exist_ok=True)
        path = write_first(paths, lambda path: write_scales(path, scales))
        click.echo(f"octavo: calibrated {kv_format} on {len(token_ids)} tokens; wrote {path}", err=True)
        return read_scales(path, kv_format, self.source.digest)


def _open(model: str, values: dict[str, Any]) -> _Opened:
    from octavo.cli.model_cache import resolve_model
    from octavo.cli.progress import progress_bar
    from octavo.engine.tokenizer import Tokenizer
    from octavo.kernels.native import NativeOps
    from octavo.models.loader import load_model, open_model
    from octavo.models.packed_size import resolve_weights_dtype

    config = config_from(ExecutorConfig, values)
    source = open_model(resolve_model(model))
    ops = NativeOps(config.threads, config.instruction_set)
    weights_dtype = resolve_weights_dtype(config.weights_dtype, source.config.dtype)
    with progress_bar(f"loading {model}") as progress:
        loaded = load_model(source, ops, weights_dtype, progress)
    return _Opened(source, loaded, ops, Tokenizer.from_source(source.tokenizer_source), weights_dtype)


def _write(report: dict[str, Any], model: Path, output: Path | None) -> Path:
    """Where it was asked for, else beside the model, else in the user's cache directory."""
    from octavo.cli.model_cache import cache_dir
    from octavo.executor.certificate import certificate_name, folders, write_certificate

    name = certificate_name(report)
    paths = [folder / f"{start}{name}" for folder, start in folders(model, cache_dir())] if output is None else [output]
    return write_first(paths, lambda path: write_certificate(path, report))


def write_first(paths: Sequence[Path], write: Callable[[Path], None]) -> Path:
    """Write to the first of these places that takes it. Raises ConfigError where none does."""
    for path in paths:
        try:
            write(path)
        except ConfigError as error:
            failed = error
        else:
            return path
    raise failed
