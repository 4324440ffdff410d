"""Advice as JSON and as tables. It computes nothing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from octavo.replay.advice import Advice
from octavo.replay.cache_report import GIB, Table


def advice_json(advice: Advice) -> dict[str, Any]:
    """The keys that scripts read; see docs/reference/replay.md."""
    return {"mode": "advice", **asdict(advice)}


def advice_tables(advice: Advice) -> list[Table]:
    summary = (
        ("requests", f"{advice.requests:,} of {advice.sessions:,} talks"),
        ("prompt tokens", f"{advice.tokens:,}"),
        ("prefill, nothing reused", f"{advice.prefill_s:,.2f} s on {advice.cost}"),
        ("cache of the device", f"{advice.device_blocks * advice.bytes_per_block / GIB:,.2f} GiB"),
    )
    rows = tuple(
        (
            one.name,
            "yes" if one.pays else "no",
            f"{one.hit_tokens:,}",
            f"{one.prompt_share:.1%}",
            f"{one.prefill_s_saved:,.2f}",
            f"{one.ttft_s_saved * 1000:,.1f}",
            f"{one.bytes_needed / GIB:,.2f}",
            one.about,
        )
        for one in advice.reuses
    )
    columns = ("reuse", "pays", "tokens", "of prompts", "s saved", "ms a request", "GiB", "")
    tables = [Table("load", ("", ""), summary), Table("which reuse pays", columns, rows)]
    if advice.turns:
        turns = tuple(
            (
                str(turn.number),
                str(turn.session),
                f"{turn.prompt_tokens:,}",
                f"{turn.hit_tokens:,}",
                f"{turn.prompt_tokens - turn.hit_tokens:,}",
                f"{turn.ttft_s * 1000:,.1f}",
            )
            for turn in advice.turns
        )
        about = ("request", "talk", "prompt", "hit", "computed", "ms to the first token")
        tables.append(Table("turn by turn", about, turns))
    return tables
