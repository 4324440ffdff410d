"""`octavo replay --mode cache`: joins trace, cache study and report."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from octavo.cli.replay import cache_blocks, curve_points
from octavo.cli.replay_output import Found
from octavo.core.kv_bytes import FORMAT_BYTES
from octavo.errors import ConfigError
from octavo.replay.cache_policy import run_policy
from octavo.replay.cache_report import CachePrices, Table, cache_json, cache_tables
from octavo.replay.cache_study import CacheStudy, CacheStudyConfig
from octavo.replay.cost_model import roofline
from octavo.replay.hardware import find_hardware
from octavo.replay.lines import BadLines
from octavo.replay.model_shape import ModelShape, shape_of
from octavo.replay.plot import Line, Plot
from octavo.replay.trace_formats import ReadOptions, read_trace


def run_cache(trace: str, bad: BadLines, options: ReadOptions, values: dict[str, Any]) -> Found:
    num_points = curve_points(values["curve_points"])
    shape = shape_of(values["model"])
    token_bytes = bytes_per_token(shape, values["kv_cache_dtype"])
    if values["policy"] != "lru":
        return _run_policy(trace, bad, options, values)
    requests = read_trace(trace, bad, options)
    first = next(requests, None)
    if first is None:
        raise ConfigError(f"{trace} has no request that can be read; look at the lines that were passed over")
    block_size = values["block_size"] or first.block_tokens or 16
    config = CacheStudyConfig(
        block_size=values["block_size"],
        partial_blocks=values["partial_blocks"],
        sample=values["sample"],
        max_blocks=values["max_blocks"],
        asked_blocks=cache_blocks(values, token_bytes * block_size),
    )
    study = CacheStudy(config)
    study.add(first)
    for request in requests:
        study.add(request)
    report = study.report(num_points)
    prices = CachePrices(f"{shape.name} in {values['kv_cache_dtype']}", token_bytes * block_size, None)
    if values["hardware"] is not None:
        cost = roofline(shape, find_hardware(values["hardware"]), token_bytes)
        prices = CachePrices(prices.model, prices.bytes_per_block, cost.prefill_token_s, cost.name)
    sizes = tuple(point.blocks * prices.bytes_per_block / 2**30 for point in report.curve)
    lines = (
        Line("by block", sizes, tuple(point.hit_rate for point in report.curve)),
        Line("by token", sizes, tuple(point.token_hit_rate for point in report.curve)),
    )
    plot = Plot("Hit rate against the size of the cache", "GiB of cache", "hit rate", lines, log_x=True)
    return Found(f"octavo replay {trace}", cache_json(report, prices, bad.count), cache_tables(report, prices), (plot,))


def _run_policy(trace: str, bad: BadLines, options: ReadOptions, values: dict[str, Any]) -> Found:
    """Only least recently used has a curve that one pass gives; another policy is run at one size."""
    shape = shape_of(values["model"])
    block_bytes = bytes_per_token(shape, values["kv_cache_dtype"]) * (values["block_size"] or 16)
    size = cache_blocks(values, block_bytes)
    if size is None:
        raise ConfigError(f"--policy {values['policy']} needs a size: give --cache-blocks or --kv-cache-memory")
    report = run_policy(read_trace(trace, bad, options), values["policy"], size, values["block_size"])
    found = {"mode": "cache", "bad_lines": bad.count, "curve": [], **asdict(report)}
    rows = tuple((name.replace("_", " "), str(value)) for name, value in asdict(report).items())
    return Found(f"octavo replay {trace}", found, [Table("cache", ("", ""), rows)])


def bytes_per_token(shape: ModelShape, kv_format: str) -> int:
    if kv_format not in FORMAT_BYTES:
        raise ConfigError(f"--kv-cache-dtype is {kv_format!r}; it must be {' or '.join(FORMAT_BYTES)}")
    return shape.kv_spec(16, kv_format).bytes_per_token
