"""What a certification says: a table for people, JSON for programs, and the content of a certificate's file.

It does not know where files go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.certify.certification import Ask, Certification, Row
from octavo.certify.measure import PathResult
from octavo.certify.text_digest import text_digest
from octavo.executor.certificate import FILE_KIND, CertifiedSetting
from octavo.executor.kv_setting import setting_numerics
from octavo.kernels.ops import Ops

_DIGITS = 6


@dataclass(frozen=True, slots=True)
class About:
    """What a certificate is for, beside the text."""

    model_digest: str
    model_dtype: str
    weights_dtype: str
    instruction_set: str
    octavo_version: str
    created: str  # ISO 8601, UTC


def as_report(found: Certification, ask: Ask, about: About, ops: Ops) -> dict[str, Any]:
    """JSON, ready to be written as a certificate."""
    chosen = found.chosen
    return {
        "kind": FILE_KIND,
        "model_digest": about.model_digest,
        "text_digest": text_digest(ask.token_ids),
        "text_tokens": len(ask.token_ids),
        "weights_dtype": about.weights_dtype,
        "instruction_set": about.instruction_set,
        "max_model_len": ask.max_model_len,
        "octavo_version": about.octavo_version,
        "created": about.created,
        "max_kl": ask.limits.max_kl,
        "min_top1": ask.limits.min_top1,
        "max_needle_loss": ask.limits.max_needle_loss,
        "reference": _row(found.reference),
        "rows": [_row(row) for row in found.rows],
        "left_out": dict(found.left_out),
        "chosen": None if chosen is None else chosen.setting.name,
        "setting": None if chosen is None else _setting(chosen, about, ops),
        "why": why(found),
    }


def _setting(chosen: Row, about: About, ops: Ops) -> dict[str, Any]:
    scales = chosen.setting.scales
    certified = CertifiedSetting(
        kv_format=chosen.setting.kv_format,
        skip_layers=chosen.setting.skip_layers,
        scales_digest=None if scales is None else scales.digest,
        numerics="",
        name=chosen.setting.name,
    )
    return {
        "kv_cache_dtype": certified.kv_format,
        "skip_layers": list(certified.skip_layers),
        "scales_digest": certified.scales_digest,
        "numerics": setting_numerics(ops, about.weights_dtype, certified, about.model_dtype),
    }


def _row(row: Row) -> dict[str, Any]:
    cold, scales = row.paths["cold"].distance, row.setting.scales
    return {
        "format": row.setting.name,
        "kv_cache_dtype": row.setting.kv_format,
        "skip_layers": list(row.setting.skip_layers),
        "scales_digest": None if scales is None else scales.digest,
        "bytes_per_token": row.setting.bytes_per_token,
        "kl_mean": round(cold.kl_mean, _DIGITS),
        "kl_p99": round(cold.kl_p99, _DIGITS),
        "top1": round(cold.top1, _DIGITS),
        "perplexity": round(cold.perplexity, 4),
        "needle_recall": None if row.needle_recall is None else round(row.needle_recall, 4),
        "tokens_per_s": round(row.tokens_per_s, 1),
        "paths": {name: _path(path) for name, path in row.paths.items()},
        "certified": row.is_certified,
        "broken": list(row.broken),
    }


def _path(path: PathResult) -> dict[str, Any]:
    return {
        "tokens": path.distance.num_tokens,
        "cached_tokens": path.num_cached_tokens,
        "kl_mean": round(path.distance.kl_mean, _DIGITS),
        "kl_p99": round(path.distance.kl_p99, _DIGITS),
        "top1": round(path.distance.top1, _DIGITS),
        "same_bits_as_cold": path.is_same,
    }


def why(found: Certification) -> list[str]:
    """Format by format: why it is not certified."""
    rows = (found.reference, *found.rows)
    lines = [f"{row.setting.name}: {'; '.join(row.broken)}" for row in rows if not row.is_certified]
    return [*lines, *(f"{name}: not measured: {reason}" for name, reason in found.left_out.items())]


def table(report: Mapping[str, Any]) -> list[str]:
    """Lines of a report for a terminal."""
    names = [row["format"] for row in report["rows"]]
    width = max(10, *map(len, names))
    lines = [
        f"{'format':<{width}}  {'bytes/token':>11}  {'KL mean':>8}  {'KL p99':>8}  {'top-1':>7}  {'perplexity':>10}  "
        f"{'needles':>7}  {'tokens/s':>8}  paths"
    ]
    for row in [report["reference"], *report["rows"]]:
        mark = "  certified" if row["certified"] and row is not report["reference"] else ""
        same = "same bits" if all(path["same_bits_as_cold"] for path in row["paths"].values()) else "DIFFER"
        needles = "-" if row["needle_recall"] is None else f"{row['needle_recall']:.0%}"
        lines.append(
            f"{row['format']:<{width}}  {row['bytes_per_token']:>11}  {row['kl_mean']:>8.5f}  {row['kl_p99']:>8.4f}  "
            f"{row['top1']:>7.2%}  {row['perplexity']:>10.3f}  {needles:>7}  {row['tokens_per_s']:>8.1f}  {same}{mark}"
        )
    return lines


def verdict(report: Mapping[str, Any]) -> list[str]:
    """What comes of it, and what each format lacks."""
    chosen, rows = report["chosen"], {row["format"]: row for row in report["rows"]}
    bf16 = next((row for row in report["rows"] if row["format"] == "bf16"), None)
    lines = []
    if chosen is None:
        lines.append("nothing is certified: no setting keeps the limits on this text")
    else:
        bytes_of = rows[chosen]["bytes_per_token"]
        share = "" if bf16 is None or chosen == "bf16" else f", {bytes_of / bf16['bytes_per_token']:.0%} of bf16"
        lines.append(f"chosen: {chosen} ({bytes_of} bytes a token{share}); --kv-cache-dtype certified uses it")
        if bf16 is not None and bytes_of >= bf16["bytes_per_token"]:
            lines.append("nothing below bf16 is certified")
    lines += [f"not certified: {line}" for line in report["why"]]
    if report["weights_dtype"] in ("int8", "int4") and bf16 is not None and bf16["top1"] < 0.99:
        lines.append(
            f"with weights in {report['weights_dtype']} inputs of matrices are rounded to 8 bits, and the least change "
            f"moves them: bf16 itself has KL {bf16['kl_mean']:.4f} and top-1 {bf16['top1']:.2%} here. Nothing can keep "
            "limits below that; --weights-dtype bf16 or f32 rounds less"
        )
    return lines
