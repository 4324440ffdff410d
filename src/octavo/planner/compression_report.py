"""The comparison of ways to make a cache smaller as one JSON object, and as text. It chooses what is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.planner.compression import Comparison, Option
from octavo.planner.compression_advice import Advice
from octavo.planner.compression_quality import Evidence, Likelihood, Measured
from octavo.planner.tables import grid, show_bytes


@dataclass(frozen=True, slots=True)
class Compression:
    """All that is told."""

    comparison: Comparison
    advices: tuple[Advice, ...]
    evidence: tuple[Evidence, ...]
    measured: tuple[Measured, ...]
    wanted: int  # requests
    likelihoods: tuple[Likelihood, ...] = ()
    notes: tuple[str, ...] = ()


def compression_json(found: Compression) -> dict[str, Any]:
    """The keys that docs/reference/compress.md names."""
    comparison, plan = found.comparison, found.comparison.plan
    return {
        "model": plan.geometry.model,
        "architecture": plan.geometry.architecture,
        "attention": plan.geometry.attention,
        "context": plan.context,
        "requests_wanted": found.wanted,
        "weights_dtype": plan.weights_dtype,
        "weights_bytes": plan.rank_weights_bytes,
        "kv_budget_bytes": plan.kv_budget_bytes,
        "kv_cache_dtype": plan.cache.kv_format,
        "block_size": plan.pool.block_size,
        "exact": plan.is_exact,
        "rows": [_row(found, option) for option in comparison.options],
        "skipped": [{"kv_cache_dtype": name, "reason": reason} for name, reason in comparison.skipped],
        "measured": [asdict(one) for one in found.measured],
        "likelihoods": [_likelihood(one) for one in found.likelihoods],
        "evidence": [asdict(one) for one in found.evidence],
        "recommendations": [_advice(found, one) for one in found.advices],
        "notes": list(found.notes),
    }


def _row(found: Compression, option: Option) -> dict[str, Any]:
    base = found.comparison.baseline
    known = next((one for one in found.measured if one.kv_format == option.kv_format), None)
    key = (option.heads.name, option.kv_format, option.tokens.name)
    likely = next((one for one in found.likelihoods if (one.heads, one.kv_format, one.tokens) == key), None)
    return {
        "ways": list(option.ways(base.kv_format)),
        "heads": option.heads.name,
        "num_kv_heads": option.heads.num_kv_heads,
        "kv_cache_dtype": option.kv_format,
        "tokens": option.tokens.name,
        "kv_policy": option.tokens.policy,
        "kept_tokens": option.tokens.kept,
        "needs": option.needs or None,
        "kv_bytes": option.kv_bytes,
        "peak_kv_bytes": option.peak_kv_bytes,
        "relative": option.kv_bytes / base.kv_bytes,
        "requests": option.requests,
        "kl_mean": known.kl_mean if known is not None and option.ways(base.kv_format) in ((), ("bits",)) else None,
        "nats_per_token": None if likely is None else likely.nats_per_token,
        "evidence": [at for at, one in enumerate(found.evidence) if any(map(one.is_about, _names(option, base)))],
    }


def _likelihood(one: Likelihood) -> dict[str, Any]:
    return {
        "heads": one.heads,
        "kv_cache_dtype": one.kv_format,
        "tokens": one.tokens,
        "num_tokens": one.num_tokens,
        "nats_per_token": one.nats_per_token,
        "nats_before": one.nats_before,
        "perplexity": one.perplexity,
    }


def _names(option: Option, base: Option) -> list[str]:
    """Of the ways that it takes."""
    names = {"heads": option.heads.name, "bits": option.kv_format, "tokens": option.tokens.name}
    return [names[way] for way in option.ways(base.kv_format)]


def _advice(found: Compression, advice: Advice) -> dict[str, Any]:
    return {
        "scenario": advice.scenario,
        "is_enough": advice.is_enough,
        "flags": advice.flags,
        "reason": advice.reason,
        **_row(found, advice.option),
    }


def compression_text(found: Compression) -> str:
    comparison, plan = found.comparison, found.comparison.plan
    base = comparison.baseline
    lines = [
        f"{plan.geometry.model}: {plan.geometry.attention}, {plan.context:,} tokens a request",
        f"weights {show_bytes(plan.rank_weights_bytes)} ({plan.weights_dtype}), for the cache "
        f"{show_bytes(plan.kv_budget_bytes or 0)} ({plan.kv_budget_bytes:,} bytes)",
        "",
        *_table("As it is", [base], base),
        *_table("Fewer heads", comparison.having("heads"), base),
        *_table("Fewer bits", comparison.having("bits"), base),
        *_table("Fewer tokens", comparison.having("tokens"), base),
        *_table("Together", _together(comparison), base),
        *_measured(found.measured),
        *_likelihoods(found.likelihoods),
        *_evidence(found.evidence),
        f"Recommended, for {found.wanted} at once",
    ]
    for advice in found.advices:
        enough = "" if advice.is_enough else " (not enough)"
        option = advice.option
        lines += [
            f"  {advice.scenario}: {advice.flags}{enough}: {show_bytes(option.kv_bytes)} a request, "
            f"{option.requests} fit",
            f"    {advice.reason}",
        ]
    lines += [f"note: {name}: {reason}" for name, reason in comparison.skipped]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _together(comparison: Comparison, count: int = 10) -> list[Option]:
    """Of what takes two or three ways, the ones that hold most and need nothing, then those that need training."""
    own = comparison.baseline.kv_format
    whole = {one.kv_format: one.kv_bytes for one in comparison.having("bits")}
    smaller = {own, *(name for name, num_bytes in whole.items() if num_bytes < comparison.baseline.kv_bytes)}
    mixed = [one for one in comparison.options if len(one.ways(own)) > 1 and one.kv_format in smaller]
    ready = sorted((one for one in mixed if not one.needs), key=lambda one: one.kv_bytes)
    rest = sorted((one for one in mixed if one.needs and one.tokens.is_offered), key=lambda one: one.kv_bytes)
    return [*ready[:count], *rest[: count // 2]]


def _table(title: str, options: Sequence[Option], base: Option) -> list[str]:
    if not options:
        return []
    rows = []
    for one in options:
        rows.append(
            {
                "heads": one.heads.name,
                "format": one.kv_format,
                "tokens": one.tokens.name,
                "kv_bytes": one.kv_bytes,
                "share": one.kv_bytes / base.kv_bytes,
                "peak_kv_bytes": one.peak_kv_bytes,
                "requests": one.requests,
                "needs": one.needs or "-",
            }
        )
    return [title, *grid(rows), ""]


def _measured(measured: Sequence[Measured]) -> list[str]:
    if not measured:
        return ["Measured for this model: nothing; `octavo certify` or --measure does it where the model can run", ""]
    rows = [
        {
            "format": one.kv_format,
            "kl_mean": f"{one.kl_mean:.5f}",
            "kl_p99": f"{one.kl_p99:.4f}",
            "top1": f"{one.top1:.2%}",
            "within_limits": one.is_good,
            "source": one.source,
        }
        for one in measured
    ]
    return ["Measured for this model", *grid(rows), ""]


def _likelihoods(likelihoods: Sequence[Likelihood]) -> list[str]:
    if not likelihoods:
        return []
    rows = []
    for one in likelihoods:
        row = {name: text for name, text in _likelihood(one).items() if isinstance(text, str)}
        change = f"{one.nats_per_token - one.nats_before:+.4f}"
        rows.append(
            {**row, "nats": f"{one.nats_per_token:.4f}", "change": change, "perplexity": f"{one.perplexity:.2f}"}
        )
    return [f"How well this model predicts {likelihoods[0].num_tokens} tokens of the text", *grid(rows), ""]


def _evidence(evidence: Sequence[Evidence]) -> list[str]:
    lines = ["Known of each way (published figures are of other models and tasks)"]
    for one in evidence:
        lines.append(f"  {one.way}, {one.what}: {one.result}")
        lines.append(f"    {one.model}; {one.measured} [{one.source}]")
    return [*lines, ""]
