"""`octavo replay --mode allocators`: joins trace, allocators and report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.cli.replay_cache import bytes_per_token
from octavo.cli.replay_output import Found
from octavo.errors import ConfigError
from octavo.replay.allocator_report import allocator_tables, allocators_json
from octavo.replay.allocator_study import LengthLimits, compare, length_load
from octavo.replay.cost_model import roofline
from octavo.replay.hardware import Hardware, find_hardware
from octavo.replay.lines import BadLines
from octavo.replay.model_shape import ModelShape, shape_of
from octavo.replay.trace_formats import ReadOptions, read_trace

DEFAULT_HARDWARE = "A100-40GB"
DEFAULT_REQUESTS = 1000


def run_allocators(trace: str, bad: BadLines, options: ReadOptions, values: dict[str, Any]) -> Found:
    shape = shape_of(values["model"])
    hardware = find_hardware(values["hardware"] or DEFAULT_HARDWARE)
    token_bytes = bytes_per_token(shape, values["kv_cache_dtype"])
    max_model_len = values["max_model_len"] or shape.max_positions
    if values["latency_bound"] is not None and not values["latency_bound"] > 0:
        raise ConfigError(f"--latency-bound is {values['latency_bound']}; it must be more than 0 seconds")
    num_slots = kv_bytes(values, shape, hardware, token_bytes) // token_bytes
    requests = read_trace(trace, bad, replace(options, limit=None))  # it counts what is kept
    limits = LengthLimits(
        max_model_len, values["max_prompt_len"], values["too_long"], options.limit or DEFAULT_REQUESTS
    )
    load = length_load(requests, limits)
    cost = roofline(shape, hardware, token_bytes)
    rows = compare(load, cost, num_slots, max_model_len, latency_bound=values["latency_bound"])
    about = (rows, load, num_slots, cost.name)
    return Found(f"octavo replay {trace}: allocators", allocators_json(*about), allocator_tables(*about))


def kv_bytes(values: dict[str, Any], shape: ModelShape, hardware: Hardware, token_bytes: int) -> int:
    """What was asked for, else what the machine has left beside bf16 weights, less a twentieth of all of it."""
    if values["cache_blocks"] is not None:
        if values["kv_cache_memory"] is not None:
            raise ConfigError("--kv-cache-memory and --cache-blocks say the same; give one of them")
        return int(values["cache_blocks"]) * (values["block_size"] or 16) * token_bytes
    if values["kv_cache_memory"] is not None:
        return int(values["kv_cache_memory"])
    left = int(hardware.memory_bytes * 0.95) - 2 * shape.parameters
    if left < token_bytes * 16:
        raise ConfigError(
            f"{shape.name} has {2 * shape.parameters} bytes of bf16 weights, {hardware.name} has "
            f"{hardware.memory_bytes}: no room for a KV cache; name a larger --hardware, or give --kv-cache-memory"
        )
    return left
