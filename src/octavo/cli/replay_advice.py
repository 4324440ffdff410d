"""`octavo replay --advise`: joins trace, advice and report."""

from __future__ import annotations

from typing import Any

from octavo.cli.replay_allocators import DEFAULT_HARDWARE, kv_bytes
from octavo.cli.replay_cache import bytes_per_token
from octavo.cli.replay_output import Found
from octavo.replay.advice import AdviceStudy, Tiers
from octavo.replay.advice_report import advice_json, advice_tables
from octavo.replay.cost_fit import read_cost
from octavo.replay.cost_model import roofline
from octavo.replay.hardware import find_hardware
from octavo.replay.lines import BadLines
from octavo.replay.model_shape import shape_of
from octavo.replay.trace_formats import ReadOptions, read_trace


def run_advice(trace: str, bad: BadLines, options: ReadOptions, values: dict[str, Any]) -> Found:
    shape = shape_of(values["model"])
    hardware = find_hardware(values["hardware"] or DEFAULT_HARDWARE)
    token_bytes = bytes_per_token(shape, values["kv_cache_dtype"])
    cost = read_cost(values["cost"]) if values["cost"] is not None else roofline(shape, hardware, token_bytes)
    requests = read_trace(trace, bad, options)
    first = next(requests, None)
    size = values["block_size"] or (first.block_tokens if first is not None else 0) or 16
    device = values["cache_blocks"] or kv_bytes(values, shape, hardware, token_bytes) // (token_bytes * size)
    tiers = Tiers(device, values["host_memory"] // (token_bytes * size), values["disk"] // (token_bytes * size))
    study = AdviceStudy(cost, tiers, token_bytes, values["block_size"])
    if first is not None:
        study.add(first)
    for request in requests:
        study.add(request)
    advice = study.advice()
    return Found(f"octavo replay {trace}: advice", advice_json(advice), advice_tables(advice))
