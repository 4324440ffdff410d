"""`octavo serve`: joins model, engine and HTTP server, and says how to reach them. It does not know how they work."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli import environment
from octavo.cli.boot import boot_lines, plan_line, ready_lines
from octavo.cli.flags import config_from, flags_of
from octavo.cli.model_flags import model_flags
from octavo.engine.config import EngineConfig
from octavo.server.config import ServerConfig

if TYPE_CHECKING:
    from octavo.cli.loading import ModelFlags, OpenModel
    from octavo.engine.async_engine import AsyncEngine
    from octavo.server.run import ServeReport
    from octavo.server.served_model import ServedModel

LOG_LEVELS = ("debug", "info", "warning", "error")


@click.command()
@click.argument("model", metavar="MODEL", required=False)
@flags_of(ServerConfig, EngineConfig)
@click.option(
    "--served-model-name",
    "served_model_names",
    multiple=True,
    metavar="NAME",
    help="Name under which clients ask for MODEL; may be repeated. [default: MODEL as given]",
)
@click.option(
    "--seed",
    type=int,
    help="Requests that bring no seed get theirs from this one, in their order. [default: random]",
)
@click.option(
    "--kv-curve/--no-kv-curve",
    default=True,
    show_default=True,
    help="Estimate what other sizes of the KV cache would hit, for GET /v1/kv/mrc.",
)
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Record requests (token ids masked, no text) and what the cache does, for `octavo replay`. FILE.gz is packed.",
)
@click.option("--record-text", is_flag=True, help="With --record: the texts of prompts and answers as well.")
@click.option(
    "--executor",
    type=click.Choice(("native", "sim")),
    default="native",
    show_default=True,
    help="sim pretends to be another machine: it takes as long, and answers with letters. MODEL is not needed.",
)
@click.option(
    "--config", metavar="MODEL", help="For --executor sim: the config.json (or name) of the model to pretend."
)
@click.option("--hardware", metavar="NAME", help="For --executor sim: the machine to pretend, as in `octavo replay`.")
@click.option(
    "--cost",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="For --executor sim: a cost model of `octavo calibrate-cost`.",
)
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="warning", show_default=True, help="What to log.")
@model_flags
def serve(
    model: str | None,
    served_model_names: tuple[str, ...],
    seed: int | None,
    record: Path | None,
    record_text: bool,
    kv_curve: bool,
    log_level: str,
    **values: Any,
) -> None:
    """Serve MODEL with an OpenAI-compatible API until SIGTERM or Ctrl-C.

    MODEL is a directory, a .gguf file, an alias such as smollm2, or a hub id.
    """
    check_executor(model, values)
    if record_text and record is None:
        raise click.UsageError("--record-text goes with --record FILE; add that, or leave it out")
    values["api_keys"] = (*values["api_keys"], *environment.api_keys())
    server_config, engine_config = config_from(ServerConfig, values), config_from(EngineConfig, values)
    from octavo.cli.loading import check_flags
    from octavo.server.run import bind_socket
    from octavo.server.run import serve as run_server

    flags = check_flags(values)
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with bind_socket(server_config.host, server_config.port) as bound:
        opened = open_model(model, flags, values)
        click.echo("\n".join(boot_lines(opened)), err=True)
        logging.getLogger("octavo.memory").info(plan_line(opened.loaded.memory))
        engine = start_engine(opened, engine_config, seed, kv_curve=kv_curve)
        info = served_model(opened, served_model_names or (model or opened.name,))
        on_ready = partial(say_ready, info, server_config)
        with ExitStack() as around:
            if record is not None:
                from octavo.cli.recording import recorded

                around.enter_context(recorded(record, opened, with_text=record_text))
            around.enter_context(what_is_loaded_stays())
            report = run_server(engine, info, server_config, bound=bound, on_ready=on_ready)
    click.echo(goodbye(report), err=True)
    click.echo(memory_line(opened), err=True)


@contextmanager
def what_is_loaded_stays() -> Iterator[None]:
    """The collector of garbage need not look through it while requests wait."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def open_model(model: str | None, flags: ModelFlags, values: dict[str, Any]) -> OpenModel:
    """The model that was asked for, or one that is pretended."""
    if values["executor"] == "sim":
        from octavo.cli.sim_model import open_simulated

        return open_simulated(model, flags, values)
    from octavo.cli.loading import load_checked

    assert model is not None
    return load_checked(model, flags)


def check_executor(model: str | None, values: dict[str, Any]) -> None:
    """Raises click.UsageError for flags that do not go together."""
    if values["executor"] == "sim":
        return
    foreign = [name for name in ("config", "hardware", "cost") if values[name] is not None]
    if foreign:
        raise click.UsageError(f"--{foreign[0]} is for --executor sim; leave it out, or add that")
    if model is None:
        raise click.UsageError("Missing argument 'MODEL'.")


def start_engine(opened: OpenModel, config: EngineConfig, seed: int | None, *, kv_curve: bool = False) -> AsyncEngine:
    """The engine around the loaded core; the server starts it. With a seed, what it draws for requests repeats."""
    from octavo.engine.async_engine import AsyncEngine

    loaded = opened.loaded
    config = dataclasses.replace(config, eos_token_ids=loaded.eos_token_ids)
    random_bytes = os.urandom if seed is None else random.Random(seed).randbytes
    curve = None
    if kv_curve:
        from octavo.replay.live_curve import LiveCurve

        curve = LiveCurve(loaded.core).snapshot
    return AsyncEngine(
        loaded.core, loaded.tokenizer, config, random_bytes=random_bytes, curve=curve, idle_work=loaded.idle_work
    )


def served_model(opened: OpenModel, names: tuple[str, ...]) -> ServedModel:
    """What the server says of the model."""
    from octavo.executor.memory import peak_resident_bytes
    from octavo.server.served_model import ServedModel

    loaded = opened.loaded
    return ServedModel(
        names=names,
        max_model_len=loaded.max_model_len,
        max_request_tokens=loaded.plan.max_request_tokens,
        vocab_size=loaded.vocab_size,
        chat_template=loaded.chat_template,
        chat_error=loaded.chat_error,
        default_sampling=loaded.default_sampling,
        created=int(time.time()),
        digest=loaded.digest,
        kv_cache_dtype=loaded.kv_cache_dtype,
        weights_dtype=loaded.weights_dtype,
        enable_prefix_caching=loaded.scheduler_config.enable_prefix_caching,
        degraded=loaded.degraded,
        memory=loaded.memory.as_object(),
        kv_setting=loaded.kv_setting.as_object(),
        peak_resident_bytes=peak_resident_bytes,
    )


def say_ready(info: ServedModel, config: ServerConfig, address: str) -> None:
    """Called when the server has begun to listen."""
    if config.access_log:  # uvicorn keeps its loggers at warnings; one line a request is asked for here
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    url = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    lines = ready_lines(url, info.name, is_chat=info.chat_template is not None, needs_key=bool(config.api_keys))
    click.echo("\n".join(lines), err=True)


def memory_line(opened: OpenModel) -> str:
    """How the plan of the memory held."""
    from octavo.executor.memory import peak_resident_bytes

    return f"octavo: {opened.loaded.memory.words(peak_resident_bytes())}"


def goodbye(report: ServeReport) -> str:
    """How the server ended, and whether a request had to be cut off."""
    cut = report.aborted_requests
    if not cut:
        return f"octavo: stopped by {report.ended_by}; every request had its answer"
    were = "request was" if cut == 1 else "requests were"
    return f"octavo: stopped by {report.ended_by}; {cut} {were} aborted, not having ended in time"
