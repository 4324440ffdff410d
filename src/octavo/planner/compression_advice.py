"""Which way to make a cache smaller, by what the requests are like; with the reason. Rules, no arithmetic of bytes.

It takes the least change with which enough requests fit. What needs training or another model it never takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.planner.compression import ALL_TOKENS, AS_TRAINED, Comparison, Option, words_of
from octavo.planner.compression_quality import Measured

SCENARIOS = ("chat", "document", "agents")
# The least change first: int8 needs no calibration and has more bits of mantissa than fp8 at nearly the same size.
_ORDER = ("f32", "bf16", "f16", "int8", "fp8_e4m3", "fp8_e5m2", "k8v4", "int4")
_DROPS: Mapping[str, str | None] = {"chat": "streaming", "document": "snapkv", "agents": None}
_ABOUT = {
    "chat": (
        "a talk is led by its last turns, so dropping what is far behind costs little; but what was dropped cannot be "
        "asked about, and is not found by the next turn"
    ),
    "document": (
        "a question may be about any place of the document, so all tokens should stay; SnapKV alone looks at the "
        "question before it drops, for one question at the end of the prompt, and holds the whole prompt until then"
    ),
    "agents": (
        "every turn sends the whole talk again, so what the prefix cache finds is worth more than memory: policies "
        "that drop tokens end it, and tool results are asked about exactly"
    ),
}


@dataclass(frozen=True, slots=True)
class Advice:
    scenario: str
    option: Option
    is_enough: bool  # whether as many requests fit as were asked for
    reason: str

    @property
    def flags(self) -> str:
        """Of `octavo serve`."""
        kept = f" --kv-policy {self.option.tokens.policy}" if self.option.tokens.policy else ""
        return f"--kv-cache-dtype {self.option.kv_format}{kept}"


def advise(found: Comparison, scenario: str, wanted: int, measured: Sequence[Measured] = ()) -> Advice:
    """wanted: requests of the context that must fit side by side. measured: of this very model."""
    ladder = _ladder(found, scenario, measured)
    about = _ABOUT[scenario]
    for option in ladder:
        if option.requests >= wanted:
            return Advice(scenario, option, True, f"{_why(found, option, wanted, measured)}; {about}")
    most = max(ladder, key=lambda one: one.requests)  # of equals the least change
    short = f"{most.requests} of the {wanted} requests that were asked for fit, and nothing that is ready holds more"
    others = [one for one in found.options if one.requests >= wanted and one.needs]
    trained = max(others, key=lambda one: (one.heads.name == AS_TRAINED, one.kv_bytes), default=None)
    cure = "give more memory or a shorter --context"
    if trained is not None:
        cure += f", or take {words_of(trained)} ({trained.needs})"
    return Advice(scenario, most, False, f"{short}: {cure}; {about}")


def _ladder(found: Comparison, scenario: str, measured: Sequence[Measured]) -> list[Option]:
    """What may be taken, the least change first."""
    good = {one.kv_format: one.is_good for one in measured}
    base = found.baseline
    usable = [one for one in found.options if one.heads.name == AS_TRAINED and not one.needs]
    smaller = [one for one in usable if one.kv_bytes < base.kv_bytes and good.get(one.kv_format, True)]
    if any(good.values()):  # what was measured and is good goes before what nobody measured, which is left out
        smaller = [one for one in smaller if good.get(one.kv_format, False) or one.kv_format == base.kv_format]
    whole = [one for one in smaller if one.tokens.name == ALL_TOKENS]
    drops = _DROPS[scenario]
    dropping = [one for one in smaller if drops and (one.tokens.policy or "").startswith(drops)]
    whole.sort(key=lambda one: _rank(one.kv_format))
    dropping.sort(key=lambda one: (-one.tokens.kept, _rank(one.kv_format)))
    return [base, *whole, *dropping]


def _rank(kv_format: str) -> int:
    return _ORDER.index(kv_format) if kv_format in _ORDER else len(_ORDER)


def _why(found: Comparison, option: Option, wanted: int, measured: Sequence[Measured]) -> str:
    fit = f"{option.requests} requests fit" if option.requests > 1 else "1 request fits"
    if option is found.baseline:
        return f"{fit} as the model is, {wanted} asked for: nothing needs to be given up"
    parts = [
        f"{fit} in {option.kv_bytes / found.baseline.kv_bytes:.0%} of the bytes; it is the least change that holds "
        f"{wanted}"
    ]
    known = next((one for one in measured if one.kv_format == option.kv_format), None)
    if known is not None:
        parts.append(
            f"{known.kv_format} measured at KL {known.kl_mean:.4f}, same best token {known.top1:.1%} ({known.source})"
        )
    elif option.kv_format != found.baseline.kv_format:
        parts.append(
            f"{option.kv_format} not measured for this model: run `octavo certify` or --measure before it serves"
        )
    if option.kv_format.startswith("fp8"):
        parts.append("it wants calibrated scales")
    return "; ".join(parts)
