"""`octavo replay --mode timed`: joins trace, the engine's scheduler, a cost model and report."""

from __future__ import annotations

from typing import Any

from octavo.cli.replay_allocators import DEFAULT_HARDWARE, kv_bytes
from octavo.cli.replay_cache import bytes_per_token
from octavo.cli.replay_output import Found
from octavo.core.config import SchedulerConfig
from octavo.errors import ConfigError
from octavo.replay.cost_fit import read_cost
from octavo.replay.cost_model import CostModel, roofline
from octavo.replay.hardware import find_hardware
from octavo.replay.lines import BadLines
from octavo.replay.model_shape import shape_of
from octavo.replay.policies import policy_named
from octavo.replay.timed import TimedConfig, TimedReplay
from octavo.replay.timed_report import timed_json, timed_plot, timed_tables
from octavo.replay.trace_formats import ReadOptions, read_trace


def run_timed(trace: str, bad: BadLines, options: ReadOptions, values: dict[str, Any]) -> Found:
    config, cost = timed_config(values)
    if not values["speed"] > 0:
        raise ConfigError(f"--speed is {values['speed']}; it must be more than 0")
    policy, listener = policy_named(values["policy"], config.num_blocks)
    replay = TimedReplay(config, cost, policy)
    if listener is not None:
        replay.core.add_listener(listener)
    report = replay.run(read_trace(trace, bad, options))
    about = {
        "policy": values["policy"],
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "max_model_len": config.scheduler.max_model_len,
        "kv_bytes": config.spec.pool_bytes(config.num_blocks),
        "speed": config.speed,
        "bad_lines": bad.count,
    }
    found = timed_json(report, about)
    return Found(f"octavo replay {trace}: timed", found, timed_tables(report), (timed_plot(report),))


def timed_config(values: dict[str, Any]) -> tuple[TimedConfig, CostModel]:
    """What the flags say. Raises ConfigError."""
    shape = shape_of(values["model"])
    hardware = find_hardware(values["hardware"] or DEFAULT_HARDWARE)
    token_bytes = bytes_per_token(shape, values["kv_cache_dtype"])
    spec = shape.kv_spec(values["block_size"] or 16, values["kv_cache_dtype"])
    scheduler = SchedulerConfig(
        max_num_seqs=values["max_num_seqs"],
        max_num_batched_tokens=values["max_num_batched_tokens"],
        max_model_len=values["max_model_len"] or shape.max_positions,
        enable_prefix_caching=values["enable_prefix_caching"],
    )
    num_blocks = values["cache_blocks"] or spec.num_blocks(kv_bytes(values, shape, hardware, token_bytes))
    cost = read_cost(values["cost"]) if values["cost"] is not None else roofline(shape, hardware, token_bytes)
    return TimedConfig(scheduler, spec, num_blocks, speed=values["speed"]), cost
