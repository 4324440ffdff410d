"""A timed replay as JSON keys, tables and a picture of the pool over time. It computes nothing."""

from __future__ import annotations

from typing import Any

from octavo.replay.cache_report import Table
from octavo.replay.plot import Line, Plot
from octavo.replay.quantiles import Quantiles
from octavo.replay.timed import TimedReport


def timed_json(report: TimedReport, about: dict[str, Any]) -> dict[str, Any]:
    """The keys that scripts read; see docs/reference/replay.md. `about`: what was assumed."""
    status = report.status
    return {
        "mode": "timed",
        "requests": report.requests,
        "refused": report.refused,
        "refused_reasons": list(report.refused_reasons),
        "tokens": status.prompt_tokens,
        "output_tokens": status.generation_tokens,
        "duration_s": report.duration_s,
        "requests_per_s": report.requests_per_s,
        "output_tokens_per_s": report.output_tokens_per_s,
        "ttft_s": report.ttft_s.summary(),
        "itl_s": report.itl_s.summary(),
        "e2e_s": report.e2e_s.summary(),
        "queue_max": report.queue_max,
        "queue_mean_s": report.queue_mean_s,
        "running_max": report.running_max,
        "preemptions": status.preemptions,
        "steps": status.steps,
        "hit_tokens": status.hit_tokens,
        "token_hit_rate": status.hit_tokens / status.queries_tokens if status.queries_tokens else 0.0,
        "computed_tokens": status.computed_tokens,
        "recomputed_tokens": status.recomputed_tokens,
        "restored_tokens": status.restored_tokens,
        "evicted_blocks": status.evicted_blocks,
        "cache_blocks": status.num_blocks,
        "block_size": status.block_size,
        "occupancy": [
            {
                "time_s": one.time_s,
                "used_blocks": one.used_blocks,
                "cached_blocks": one.cached_blocks,
                "running": one.running,
                "waiting": one.waiting,
            }
            for one in report.occupancy
        ],
        "cost_model": report.cost,
        **about,
    }


def timed_tables(report: TimedReport) -> list[Table]:
    status = report.status
    summary = [
        ("requests", f"{report.requests:,} answered, {report.refused:,} refused"),
        ("time", f"{report.duration_s:,.2f} s on {report.cost}"),
        ("throughput", f"{report.output_tokens_per_s:,.1f} output tokens/s, {report.requests_per_s:,.3f} requests/s"),
        ("steps", f"{status.steps:,}"),
        ("requests at once", f"{report.running_max:,} at most"),
        ("queue", f"{report.queue_max:,} at most, {report.queue_mean_s:,.3f} s in the mean"),
        ("preemptions", f"{status.preemptions:,} ({status.recomputed_tokens:,} tokens computed again)"),
        ("prompt tokens from the cache", f"{status.hit_tokens:,} of {status.queries_tokens:,}"),
        ("blocks", f"{status.num_blocks:,} of {status.block_size} tokens; {status.evicted_blocks:,} evicted"),
        *(("refused", reason) for reason in report.refused_reasons),
    ]
    rows = (
        _times("time to first token", report.ttft_s),
        _times("time between tokens", report.itl_s),
        _times("whole request", report.e2e_s),
    )
    columns = ("seconds", "p50", "p90", "p95", "p99", "mean", "max")
    return [Table("timed replay", ("", ""), tuple(summary)), Table("latencies", columns, rows)]


def _times(name: str, times: Quantiles) -> tuple[str, ...]:
    return (name, *(f"{value:,.4f}" for value in times.summary().values()))


def timed_plot(report: TimedReport) -> Plot:
    times = tuple(one.time_s for one in report.occupancy)
    total = max(1, report.status.num_blocks)
    return Plot(
        "The pool over time",
        "seconds",
        "share of the blocks; requests that wait, of the most",
        (
            Line("held", times, tuple(one.used_blocks / total for one in report.occupancy)),
            Line("cached and idle", times, tuple(one.cached_blocks / total for one in report.occupancy)),
            Line(
                f"waiting (1: {report.queue_max})",
                times,
                tuple(one.waiting / max(1, report.queue_max) for one in report.occupancy),
            ),
        ),
    )
