"""`octavo replay --mode sharing`: joins lengths of a trace, recorded fork trees, and what branches save."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from octavo.cli.replay_output import Found
from octavo.errors import ConfigError
from octavo.replay.allocator_study import LengthLimits, length_load
from octavo.replay.cache_report import Table
from octavo.replay.fork_trees import ForkTree, fork_trees, read_trees
from octavo.replay.lines import BadLines, read_lines
from octavo.replay.model_shape import shape_of
from octavo.replay.sharing_study import PUBLISHED, Saving, study_beams, study_samples
from octavo.replay.trace_formats import ReadOptions, read_trace

SAMPLES = (2, 4, 6)
DEFAULT_REQUESTS = 300


def run_sharing(trace: str, bad: BadLines, options: ReadOptions, values: dict[str, Any]) -> Found:
    max_model_len = values["max_model_len"] or shape_of(values["model"]).max_positions
    limits = LengthLimits(
        max_model_len, values["max_prompt_len"], values["too_long"], options.limit or DEFAULT_REQUESTS
    )
    load = length_load(read_trace(trace, bad, options), limits)
    size = values["block_size"] or 16
    savings = [study_samples(load.requests, count, size) for count in SAMPLES]
    trees: dict[int, list[ForkTree]] = {}
    if values["fork_trees"] is not None:
        for tree in _trees(values["fork_trees"]):
            trees.setdefault(tree.width, []).append(tree)
    savings += [study_beams(load.requests, trees[width], size) for width in sorted(trees)]
    mean = sum(one.prompt for one in load.requests) / len(load.requests)
    answer = sum(one.output for one in load.requests) / len(load.requests)
    found = {
        "mode": "sharing",
        "requests": len(load.requests),
        "block_size": size,
        "mean_prompt_tokens": mean,
        "mean_output_tokens": answer,
        "fork_trees": {str(width): len(some) for width, some in trees.items()},
        "rows": [asdict(one) for one in savings],
        "published": PUBLISHED,
    }
    lengths = f"prompt {mean:.1f} and answer {answer:.1f} tokens in the mean"
    about = f"{len(load.requests):,} requests, {lengths}, blocks of {size}"
    return Found(f"octavo replay {trace}: sharing", found, [_table(savings, about)])


def _trees(path: Any) -> list[ForkTree]:
    """Of a file of trees, or of a recording."""
    if path.suffix == ".gz" or (path.is_file() and b'"octavo_record"' in path.read_bytes()[:200]):
        lines = read_lines(str(path), BadLines())
        next(lines, None)
        found = fork_trees(lines)
        if not found:
            raise ConfigError(f"{path} has no beam search with two beams or more; record one")
        return found
    return read_trees(path)


def _table(savings: list[Saving], about: str) -> Table:
    rows = tuple(
        (
            f"{one.branches} {one.kind}",
            f"{one.blocks:,.1f}",
            f"{one.blocks_without:,.1f}",
            f"{one.saved_share:.1%}",
            PUBLISHED[one.kind],
        )
        for one in savings
    )
    return Table(about, ("", "blocks", "without sharing", "saved", "published"), rows)
