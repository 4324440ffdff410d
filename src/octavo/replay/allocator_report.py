"""A comparison of allocators as JSON keys and tables, each figure beside the published one. It computes ratios only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.replay.allocator_study import AllocatorRow, LengthLoad
from octavo.replay.cache_report import Table

PAGED = "paged 16"


def allocators_json(rows: Sequence[AllocatorRow], load: LengthLoad, num_slots: int, cost: str) -> dict[str, Any]:
    """The keys that scripts read; see docs/reference/replay.md."""
    return {
        "mode": "allocators",
        "requests": len(load.requests),
        "dropped": load.dropped,
        "truncated": load.truncated,
        "tokens": sum(one.prompt for one in load.requests),
        "output_tokens": sum(one.output for one in load.requests),
        "kv_slots": num_slots,
        "cost_model": cost,
        "rows": [_row_json(row) for row in rows],
    }


def _row_json(row: AllocatorRow) -> dict[str, Any]:
    out = row.outcome
    found: dict[str, Any] = {
        "allocator": out.allocator,
        "used_share": out.shares.used,
        "reserved_share": out.shares.reserved,
        "internal_share": out.shares.internal,
        "external_share": out.shares.external,
        "max_concurrency": out.max_concurrency,
        "mean_concurrency": out.mean_concurrency,
        "throughput": out.requests_per_s,
        "output_tokens_per_s": out.tokens_per_s,
        "preemptions": out.preemptions,
    }
    if row.rate_at_bound is not None:
        found["rate_at_latency_bound"] = row.rate_at_bound
    if row.published:
        found["published"] = row.published
    return found


def allocator_tables(rows: Sequence[AllocatorRow], load: LengthLoad, num_slots: int, cost: str) -> list[Table]:
    mean_prompt = sum(one.prompt for one in load.requests) / len(load.requests)
    mean_output = sum(one.output for one in load.requests) / len(load.requests)
    summary = [
        ("requests", f"{len(load.requests):,} (prompt {mean_prompt:.1f}, answer {mean_output:.1f} tokens in the mean)"),
        ("longer than the context", f"{load.dropped:,} left out, {load.truncated:,} cut"),
        ("KV cache", f"{num_slots:,} tokens"),
        ("time of a step", cost),
    ]
    columns = ["allocator", "used", "reserved", "internal", "external", "at once", "mean", "requests/s"]
    has_rates = any(row.rate_at_bound is not None for row in rows)
    columns += ["at equal latency"] if has_rates else []
    columns += ["published"]
    cells = []
    for row in rows:
        out, shares = row.outcome, row.outcome.shares
        line = [out.allocator, *(f"{share:.1%}" for share in (shares.used, shares.reserved))]
        line += [f"{shares.internal:.1%}", f"{shares.external:.1%}", str(out.max_concurrency)]
        line += [f"{out.mean_concurrency:.1f}", f"{out.requests_per_s:.3f}"]
        if has_rates:
            line.append("" if row.rate_at_bound is None else f"{row.rate_at_bound:.3f}")
        line.append("; ".join(f"{name} {value}" for name, value in row.published.items()))
        cells.append(tuple(line))
    tables = [Table("load", ("", ""), tuple(summary)), Table("allocators", tuple(columns), tuple(cells))]
    return [*tables, _ratios(rows)]


def _ratios(rows: Sequence[AllocatorRow]) -> Table:
    """How much more the paged cache serves than the others."""
    of = {row.outcome.allocator: row for row in rows}
    paged, cells = of[PAGED], []
    for name in ("ft", "orca max", "orca pow2", "orca oracle"):
        row = of[name]
        line = [name, f"{paged.outcome.requests_per_s / row.outcome.requests_per_s:.2f}"]
        if paged.rate_at_bound is not None:
            line.append(f"{paged.rate_at_bound / row.rate_at_bound:.2f}" if row.rate_at_bound else "-")
        line.append(row.published.get("rate", ""))
        cells.append(tuple(line))
    columns = ["paged 16 against", "at full load"]
    columns += ["at equal latency"] if paged.rate_at_bound is not None else []
    return Table("times the requests", (*columns, "published"), tuple(cells))
