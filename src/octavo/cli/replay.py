"""`octavo replay`: what a trace would do to another cache, policy or machine. It joins trace and mode."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.flags import bytes_option
from octavo.cli.replay_output import OutputFlags, check_output, show
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.replay.trace_formats import ReadOptions

MODES = ("cache", "timed", "allocators", "sharing", "events")
TRACE_FORMATS = ("auto", "mooncake", "weka", "lmcache", "talks", "text", "lengths", "record")


# What only some modes have a use for; "advise" stands for --advise.
ONLY_FOR: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("partial_blocks", "sample", "max_blocks", "curve_points"), ("cache",)),
    **dict.fromkeys(("speed", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching"), ("timed",)),
    **dict.fromkeys(("max_prompt_len", "too_long"), ("allocators", "sharing")),
    **dict.fromkeys(("host_memory", "disk"), ("advise",)),
    **dict.fromkeys(("cache_blocks", "kv_cache_memory", "hardware"), ("cache", "timed", "allocators", "advise")),
    "cost": ("timed", "advise"),
    "max_model_len": ("timed", "allocators", "sharing"),
    "latency_bound": ("allocators",),
    "fork_trees": ("sharing",),
    "block_size": ("cache", "timed", "allocators", "sharing", "advise"),
}


@click.command()
@click.argument("trace")
@click.option("--mode", type=click.Choice(MODES), default="cache", show_default=True, help="What to find out.")
@click.option("--format", "trace_format", type=click.Choice(TRACE_FORMATS), default="auto", show_default=True)
@click.option("--advise", is_flag=True, help="Tell which kind of reuse this load pays for, and what each is worth.")
@click.option(
    "--bad-lines",
    type=click.Choice(("fail", "skip")),
    default="fail",
    show_default=True,
    help="What to do with a line that cannot be read: end, or count it and go on.",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Read the first N requests only.")
@click.option(
    "--hash-block-tokens",
    type=click.IntRange(1, 1 << 20),
    default=512,
    show_default=True,
    help="Tokens behind one of a Mooncake trace's hash_ids.",
)
@click.option(
    "--hash-ids",
    type=click.Choice(("chained", "plain")),
    default="chained",
    show_default=True,
    help="Whether an id of a Mooncake trace names everything up to its block, or the block alone.",
)
@click.option(
    "--turns",
    type=click.Choice(("all", "first")),
    default="all",
    show_default=True,
    help="Of a file of lengths whose rows each hold the talk so far: all, or the first of each talk.",
)
@click.option("--tokenizer", metavar="MODEL", help="Whose tokens a trace of text is counted in. [default: 4 letters]")
@click.option(
    "--config", "model", default="llama-3.1-8b", show_default=True, metavar="MODEL", help="config.json or name."
)
@click.option("--hardware", metavar="NAME", help="Machine to reckon times of, from the catalogue: A100-40GB, H100, ...")
@click.option(
    "--block-size", type=click.IntRange(1, 1 << 20), metavar="N", help="Tokens of a block. [default: the trace's]"
)
@click.option("--cache-blocks", type=click.IntRange(1), metavar="N", help="Size of the cache in blocks.")
@bytes_option("--kv-cache-memory", help="Size of the cache in bytes: 512MiB, 2GB, ...")
@click.option("--kv-cache-dtype", default="bf16", show_default=True, metavar="DTYPE", help="Format of K and V.")
@click.option(
    "--partial-blocks",
    type=click.Choice(("whole", "tokens")),
    default="whole",
    show_default=True,
    help="What the last, unfilled block of a prompt takes up: a block, as in the engine, or only its tokens.",
)
@click.option("--sample", type=float, default=1.0, show_default=True, help="Share of the blocks that is looked at.")
@click.option("--max-blocks", type=click.IntRange(1), metavar="N", help="The largest cache of interest: bounds memory.")
@click.option("--curve", "curve_points", default="48", show_default=True, metavar="N|all", help="Sizes on the curve.")
@bytes_option("--host-memory", default="64GiB", help="Memory below the cache, for --advise. [default: 64GiB]")
@bytes_option("--disk", default="1TB", help="Disk below that, for --advise. [default: 1TB]")
@click.option(
    "--policy",
    default="lru",
    show_default=True,
    metavar="NAME",
    help="Which idle block goes first: lru, lfu, priority.",
)
@click.option("--cost", type=click.Path(path_type=Path, dir_okay=False), help="Cost model: FILE of `calibrate-cost`.")
@click.option("--speed", type=float, default=1.0, show_default=True, help="2 brings the requests twice as fast.")
@click.option("--max-num-seqs", type=click.IntRange(1), default=256, show_default=True, help="Requests at once.")
@click.option(
    "--max-num-batched-tokens", type=click.IntRange(1), default=2048, show_default=True, help="Tokens of one step."
)
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching", default=True, help="Let requests share common beginnings."
)
@click.option(
    "--max-model-len", type=click.IntRange(2), metavar="N", help="Longest request. [default: the model's context]"
)
@click.option("--max-prompt-len", type=click.IntRange(1), metavar="N", help="Leave out requests with longer prompts.")
@click.option(
    "--too-long",
    type=click.Choice(("drop", "truncate")),
    default="drop",
    show_default=True,
    help="What to do with a request beyond --max-model-len: leave it out, or cut its prompt.",
)
@click.option(
    "--fork-trees",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Beam searches for --mode sharing: a recording that has some, or trees made of one.",
)
@click.option("--latency-bound", type=float, metavar="S", help="Also find the rate at which a token takes S seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write a picture: FILE.svg or FILE.png.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with tables and pictures.")
@click.option(
    "--write-trace", type=click.Path(path_type=Path, dir_okay=False), help="Write the trace as Mooncake JSONL."
)
def replay(trace: str, mode: str, **values: Any) -> None:
    """Replay TRACE: a file (plain or gzip), a folder of sessions, - for standard input, or generate:KIND.

    Traces: Mooncake JSONL, WEKA sessions, LMCache agent logs, talks (JSONL with messages), CSV of lengths.
    """
    check_mode("advise" if values["advise"] else mode)
    output = OutputFlags(values.pop("as_json"), values.pop("plot"), values.pop("html"))
    check_output(output)
    from octavo.cli.replay_advice import run_advice
    from octavo.cli.replay_allocators import run_allocators
    from octavo.cli.replay_cache import run_cache
    from octavo.cli.replay_events import RecordingDiffersError, run_events
    from octavo.cli.replay_sharing import run_sharing
    from octavo.cli.replay_timed import run_timed
    from octavo.replay.lines import BadLines

    if values["policy"] != "lru" and (mode not in ("cache", "timed") or values["advise"]):
        raise ConfigError(f"--policy {values['policy']} is for the modes cache and timed; leave it out")
    bad = BadLines(skip=values["bad_lines"] == "skip")
    options = read_options(values)
    if values["write_trace"] is not None:
        from octavo.cli.replay_write import write_trace

        write_trace(trace, bad, options, values)
        return
    if values["advise"]:
        found = run_advice(trace, bad, options, values)
    elif mode == "events":
        found = run_events(trace, bad)
    else:
        modes = {"cache": run_cache, "timed": run_timed, "allocators": run_allocators, "sharing": run_sharing}
        found = modes[mode](trace, bad, options, values)
    show(found, output)
    for reason in bad.reasons:
        click.echo(f"octavo: passed over {reason}", err=True)
    if bad.count > len(bad.reasons):
        click.echo(f"octavo: and {bad.count - len(bad.reasons)} lines more", err=True)
    sys.stdout.flush()
    if found.json.get("difference") is not None:
        raise RecordingDiffersError("the replay differs from the recording, as the result says")


def check_mode(mode: str) -> None:
    """Raises ConfigError for a flag that was given and that the mode has no use for."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        is_given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if is_given and name in ONLY_FOR and mode not in ONLY_FOR[name]:
            words = " and ".join("--advise" if one == "advise" else f"--mode {one}" for one in ONLY_FOR[name])
            raise ConfigError(f"{parameter.opts[0]} is for {words}; leave it out")


def read_options(values: dict[str, Any]) -> ReadOptions:
    from octavo.replay.trace_formats import ReadOptions

    tokenize = None
    if values["tokenizer"] is not None:
        from octavo.cli.tokenizer_only import tokenizer_of

        tokenizer = tokenizer_of(values["tokenizer"])
        tokenize = tokenizer.encode
    is_chained = values["hash_ids"] == "chained"
    return ReadOptions(
        trace_format=values["trace_format"],
        hash_block_tokens=values["hash_block_tokens"],
        hash_ids_are_chained=is_chained,
        tokenize=tokenize,
        limit=values["limit"],
        only_first_turns=values["turns"] == "first",
    )


def cache_blocks(values: dict[str, Any], bytes_per_block: int) -> int | None:
    """The size of the cache that was asked for, in blocks; None: none was."""
    memory, blocks = values["kv_cache_memory"], values["cache_blocks"]
    if memory is None:
        return None if blocks is None else int(blocks)
    if blocks is not None:
        raise ConfigError("--kv-cache-memory and --cache-blocks say the same; give one of them")
    if memory < bytes_per_block:
        raise ConfigError(
            f"--kv-cache-memory is {memory} bytes, less than one block of {bytes_per_block} bytes; give more, or a "
            "smaller --block-size"
        )
    return int(memory // bytes_per_block)


def curve_points(text: str) -> int | None:
    """`48` or `all`. Raises ConfigError."""
    if text == "all":
        return None
    if not text.isdecimal() or not 2 <= int(text) <= 10_000:
        raise ConfigError(f"--curve is {text!r}; it must be a number from 2 to 10000, or all")
    return int(text)
