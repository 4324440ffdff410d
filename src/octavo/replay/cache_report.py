"""A cache study as JSON keys and as lines for the terminal. It computes nothing but what a GiB more is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.replay.cache_study import CacheReport, TenantHits
from octavo.replay.hit_curve import CurvePoint

GIB = 2**30
MAX_TENANT_ROWS = 20


@dataclass(frozen=True, slots=True)
class CachePrices:
    """What blocks cost and what hits save. `prefill_token_s` None: no machine was named."""

    model: str
    bytes_per_block: int
    prefill_token_s: float | None
    cost: str = ""


def cache_json(report: CacheReport, prices: CachePrices, bad_lines: int = 0) -> dict[str, Any]:
    """The keys that scripts read; see docs/reference/replay.md."""
    found: dict[str, Any] = {
        "mode": "cache",
        "requests": report.requests,
        "tokens": report.tokens,
        "output_tokens": report.output_tokens,
        "block_size": report.block_size,
        "blocks": report.blocks,
        "distinct_blocks": report.distinct_blocks,
        "cache_blocks": None if report.at is report.unlimited else report.at.blocks,
        "hit_blocks": report.at.hit_blocks,
        "hit_rate": report.at.hit_rate,
        "hit_tokens": report.at.hit_tokens,
        "token_hit_rate": report.at.token_hit_rate,
        "unlimited": _rates(report.unlimited),
        "curve": _curve_json(report, prices),
        "tenants": [_tenant_json(one) for one in report.tenants],
        "sample": report.sample,
        "model": prices.model,
        "kv_bytes_per_block": prices.bytes_per_block,
        "bad_lines": bad_lines,
    }
    if prices.prefill_token_s is not None:
        found["cost_model"] = prices.cost
        found["prefill_s_saved"] = report.at.hit_tokens * prices.prefill_token_s
    if report.sample < 1.0:
        found["hit_rate_error"] = report.at.hit_rate_error
    if not report.names_blocks:
        found["note"] = "the trace has lengths only: nothing in it can be seen to repeat"
    return found


def _rates(point: CurvePoint) -> dict[str, Any]:
    return {
        "hit_blocks": point.hit_blocks,
        "hit_rate": point.hit_rate,
        "hit_tokens": point.hit_tokens,
        "token_hit_rate": point.token_hit_rate,
    }


def _curve_json(report: CacheReport, prices: CachePrices) -> list[dict[str, Any]]:
    found = []
    for index, point in enumerate(report.curve):
        line: dict[str, Any] = {"blocks": point.blocks, "bytes": point.blocks * prices.bytes_per_block}
        line |= _rates(point)
        if report.sample < 1.0:
            line["hit_rate_error"] = point.hit_rate_error
        if prices.prefill_token_s is not None:
            line["prefill_s_saved_per_gib_more"] = _marginal(report.curve, index, prices)
        found.append(line)
    return found


def _marginal(curve: tuple[CurvePoint, ...], index: int, prices: CachePrices) -> float:
    """Seconds of prefill that the next GiB saves over the whole trace: the slope to the next point."""
    if index + 1 >= len(curve) or prices.prefill_token_s is None:
        return 0.0
    here, there = curve[index], curve[index + 1]
    gib = (there.blocks - here.blocks) * prices.bytes_per_block / GIB
    return (there.hit_tokens - here.hit_tokens) * prices.prefill_token_s / gib if gib else 0.0


def _tenant_json(one: TenantHits) -> dict[str, Any]:
    return {
        "tenant": one.tenant,
        "requests": one.requests,
        "tokens": one.tokens,
        "blocks": one.blocks,
        "hit_blocks": one.hit_blocks,
        "hit_rate": one.hit_blocks / one.blocks if one.blocks else 0.0,
        "token_hit_rate": one.hit_tokens / one.tokens if one.tokens else 0.0,
        "curve": [{"blocks": p.blocks, "hit_rate": p.hit_rate, "token_hit_rate": p.token_hit_rate} for p in one.curve],
    }


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts with a title, for the terminal and for HTML."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def cache_tables(report: CacheReport, prices: CachePrices) -> list[Table]:
    at = "unlimited" if report.at is report.unlimited else f"{report.at.blocks:,} blocks"
    summary = [
        ("requests", f"{report.requests:,}"),
        ("prompt tokens", f"{report.tokens:,}"),
        (f"blocks of {report.block_size} tokens", f"{report.blocks:,}"),
        ("different blocks", "not counted" if report.distinct_blocks is None else f"{report.distinct_blocks:,}"),
        ("cache", f"{at} ({prices.model})"),
        ("hit blocks", f"{report.at.hit_blocks:,} of {report.blocks:,}: {report.at.hit_rate:.4f}{_error(report.at)}"),
        ("hit tokens", f"{report.at.hit_tokens:,} of {report.tokens:,}: {report.at.token_hit_rate:.4f}"),
        ("unlimited cache", f"{report.unlimited.hit_rate:.4f} of the blocks"),
    ]
    if prices.prefill_token_s is not None:
        saved = report.at.hit_tokens * prices.prefill_token_s
        summary.append(("prefill saved", f"{saved:,.1f} s ({prices.cost})"))
    if not report.names_blocks:
        summary.append(("note", "the trace has lengths only: nothing in it can be seen to repeat"))
    tables = [Table("cache", ("", ""), tuple(summary)), _curve_table(report, prices)]
    if report.tenants:
        rows = sorted(report.tenants, key=lambda one: -one.tokens)[:MAX_TENANT_ROWS]
        cells = tuple(
            (
                one.tenant or "(none)",
                f"{one.requests:,}",
                f"{one.blocks:,}",
                f"{one.hit_blocks / max(1, one.blocks):.4f}",
            )
            for one in rows
        )
        title = f"tenants ({len(report.tenants)} in all)"
        tables.append(Table(title, ("tenant", "requests", "blocks", "hit rate"), cells))
    return tables


def _error(point: CurvePoint) -> str:
    return f" +- {point.hit_rate_error:.4f}" if point.hit_rate_error else ""


def _curve_table(report: CacheReport, prices: CachePrices) -> Table:
    columns = ["blocks", "GiB", "hit rate", "by token"]
    if prices.prefill_token_s is not None:
        columns.append("s saved by one GiB more")
    step = max(1, len(report.curve) // 16)
    shown = sorted({*range(0, len(report.curve), step), len(report.curve) - 1}) if report.curve else []
    rows = []
    for index in shown:
        point = report.curve[index]
        row = [
            f"{point.blocks:,}",
            f"{point.blocks * prices.bytes_per_block / GIB:,.2f}",
            f"{point.hit_rate:.4f}{_error(point)}",
            f"{point.token_hit_rate:.4f}",
        ]
        if prices.prefill_token_s is not None:
            row.append(f"{_marginal(report.curve, index, prices):,.2f}")
        rows.append(tuple(row))
    return Table("hit rate against the size of the cache", tuple(columns), tuple(rows))
