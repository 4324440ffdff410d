"""`octavo convert`: a model with fewer KV heads, and what that costs. It does not know how heads are pooled."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from octavo.cli.text_file import read_text, text_option

if TYPE_CHECKING:
    from octavo.engine.tokenizer import Tokenizer
    from octavo.models.loader import ModelSource

_DEFAULT_TOKENS = 512
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
)


@click.command()
@click.argument("model", metavar="MODEL")
@click.option(
    "--kv-heads", required=True, type=click.IntRange(1), metavar="N", help="KV heads of the new model: fewer than now."
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the new model is saved; a new or empty folder.",
)
@text_option("What both models are measured on. [default: a page of plain English]")
@click.option(
    "--text-tokens",
    type=click.IntRange(2),
    default=_DEFAULT_TOKENS,
    show_default=True,
    metavar="N",
    help="How much of the text is used, at most.",
)
def convert(model: str, kv_heads: int, output: Path, text_file: Path | None, text_tokens: int) -> None:
    """Save MODEL with fewer KV heads, each the mean of several, and measure how well both predict a text.

    The cache shrinks in proportion, and quality with it: the new model is meant to be trained on (Ainslie et al. 2023).
    """
    from octavo.cli.model_cache import resolve_model
    from octavo.cli.sample_text import SAMPLE_TEXT
    from octavo.engine.tokenizer import Tokenizer
    from octavo.models.convert import check_kv_heads, pool_kv_heads
    from octavo.models.loader import open_model

    source = open_model(resolve_model(model))
    config = check_kv_heads(source, kv_heads)
    tokenizer = Tokenizer.from_source(source.tokenizer_source)
    text = SAMPLE_TEXT if text_file is None else read_text(text_file, text_tokens)
    token_ids = tokenizer.encode(text)[: min(text_tokens, config.max_position_embeddings)]
    if len(token_ids) < 2:
        raise click.UsageError(f"the text has {len(token_ids)} tokens; give one of at least 2")
    _make_empty(output)
    saved = pool_kv_heads(source, kv_heads, output)
    _write_tokenizer(source, tokenizer, output)
    click.echo(f"saved in {output}: {saved.num_bytes} bytes of {saved.dtype} weights", err=True)
    before, after = measure(source, token_ids), measure(open_model(output), token_ids)
    click.echo(comparison(before, after, len(token_ids) - 1))


def _make_empty(output: Path) -> None:
    from octavo.errors import ConfigError

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} is not empty; give a new or an empty folder")
    output.mkdir(parents=True, exist_ok=True)


def _write_tokenizer(source: ModelSource, tokenizer: Tokenizer, output: Path) -> None:
    """A directory's files as they are; of a GGUF file what its metadata says."""
    directory = source.tokenizer_source.directory
    if directory is not None:
        for name in _TOKENIZER_FILES:
            if (directory / name).is_file():
                shutil.copyfile(directory / name, output / name)
        return
    tokenizer.write_directory(output, source.generation.chat_template)
    ends = list(source.generation.eos_token_ids or tokenizer.eos_token_ids)
    said = {"eos_token_id": ends, "bos_token_id": source.generation.bos_token_id}
    (output / "generation_config.json").write_text(json.dumps(said, indent=2) + "\n")


def measure(source: ModelSource, token_ids: list[int]) -> tuple[int, int, float]:
    """(KV heads, KV bytes of a token in bf16, nats a token). Weights as `auto` holds them, KV in f32."""
    from octavo.core.kv_spec import KVSpec
    from octavo.executor.likelihood import nats_per_token
    from octavo.kernels.native import NativeOps
    from octavo.models.loader import load_model
    from octavo.models.packed_size import resolve_weights_dtype

    model = load_model(source, NativeOps(), resolve_weights_dtype("auto", source.config.dtype))
    groups = model.kv_groups("bf16")
    return groups[0].num_kv_heads, KVSpec(groups, 16).bytes_per_token, nats_per_token(model, token_ids)


def comparison(before: tuple[int, int, float], after: tuple[int, int, float], num_tokens: int) -> str:
    """A small table; num_tokens is how many were predicted."""
    rows = [
        ("KV heads", f"{before[0]}", f"{after[0]}"),
        ("KV bytes per token (bf16)", f"{before[1]}", f"{after[1]}"),
        ("nats per token", f"{before[2]:.4f}", f"{after[2]:.4f}"),
        ("perplexity", f"{math.exp(min(before[2], 700.0)):.2f}", f"{math.exp(min(after[2], 700.0)):.2f}"),
    ]
    lines = [f"{'':<28}{'before':>12}{'after':>12}", *(f"{name:<28}{one:>12}{two:>12}" for name, one, two in rows)]
    lost = after[2] - before[2]
    lines.append(
        f"measured on {num_tokens} tokens: {lost:+.4f} nats per token. The new model has not been trained since it was "
        "pooled; train it on before it is used."
    )
    return "\n".join(lines)
