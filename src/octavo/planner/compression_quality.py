"""What is known of how much a way to make a cache smaller costs in answers: certificates, measures, published figures.

Data with its sources; it computes no bytes and recommends nothing. The figures of others are of their models and tasks:
they say what kind of thing to expect, not what this model will do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class Evidence:
    """One figure: of which way, what was measured of which model, with what result, and who says so."""

    way: str  # "heads", "bits" or "tokens"
    what: str
    methods: tuple[str, ...]  # beginnings of the names that it is about
    model: str
    measured: str
    result: str
    source: str
    kind: str  # "published" or "stored" (by this project, of the model itself)

    def is_about(self, name: str) -> bool:
        return any(
            name == one or ((one.endswith("-") or one in _POLICIES) and name.startswith(one)) for one in self.methods
        )


_POLICIES = ("streaming", "h2o", "snapkv")


@dataclass(frozen=True, slots=True)
class Measured:
    """What a format of this very model costs, against its cache in f32."""

    kv_format: str
    kl_mean: float
    kl_p99: float
    top1: float
    source: str  # a certificate, or a measure of just now
    is_good: bool  # within its limits


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How well this very model predicts a text when its cache is made smaller in some way."""

    heads: str
    kv_format: str
    tokens: str
    num_tokens: int  # that were predicted
    nats_per_token: float
    nats_before: float  # with its own heads, an f32 cache or its own format, and all tokens: what it is beside

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats_per_token, 700.0))


def known_evidence(model: str) -> tuple[Evidence, ...]:
    """Stored measures of the model, then published figures."""
    data = json.loads((files("octavo.planner") / "compression_quality.json").read_text(encoding="utf-8"))
    plain = model.lower()
    stored = [one for one in data["stored"] if any(name in plain for name in one["names"])]
    return tuple(
        [_evidence(one, "stored") for one in stored] + [_evidence(one, "published") for one in data["published"]]
    )


def _evidence(one: Mapping[str, Any], kind: str) -> Evidence:
    texts = {name: one[name] for name in ("way", "what", "model", "measured", "result", "source")}
    return Evidence(**texts, methods=tuple(one["methods"]), kind=kind)


def of_certificate(report: Any, name: str) -> tuple[Measured, ...]:
    """The rows of a certificate that are about one format for all layers; none where it is no certificate."""
    rows = report.get("rows") if isinstance(report, Mapping) else None
    found = []
    for row in rows if isinstance(rows, Sequence) and not isinstance(rows, str) else ():
        try:
            if row.get("skip_layers"):  # a mix of formats
                continue
            numbers = (float(row["kl_mean"]), float(row["kl_p99"]), float(row["top1"]))
            kv_format = str(row.get("kv_cache_dtype", row["format"]))
            found.append(Measured(kv_format, *numbers, f"certificate {name}", bool(row["certified"])))
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
    return tuple(found)
