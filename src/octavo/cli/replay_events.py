"""`octavo replay --mode events`: a recording done again, event by event."""

from __future__ import annotations

import json
from dataclasses import asdict

from octavo.cli.replay_output import Found
from octavo.errors import OctavoError
from octavo.replay.cache_report import Table
from octavo.replay.lines import BadLines, TraceError, read_lines, trace_files
from octavo.replay.recording import RecordingReplay


class RecordingDiffersError(OctavoError):
    """The replay is not what was recorded."""


def run_events(trace: str, bad: BadLines) -> Found:
    """Raises TraceError for what is no recording; `difference` in what is found says what differs."""
    (name, *others) = trace_files(trace)
    if others:
        raise TraceError(f"{trace} is a folder; give one recording of `octavo serve --record`")
    lines = read_lines(name, bad)
    first = next(lines, None)
    try:
        header = json.loads(first.text) if first is not None else {}
    except ValueError:
        header = {}
    report = RecordingReplay(header if isinstance(header, dict) else {}).run(lines)
    found = {"mode": "events", "is_same": report.is_same, **asdict(report)}
    rows = [
        ("requests", f"{report.requests:,}"),
        ("steps", f"{report.steps:,} ({report.tokens:,} tokens)"),
        *((f"events: {kind}", f"{count:,} the same") for kind, count in sorted(report.events.items())),
        ("resident blocks", f"{report.resident_blocks:,} by events, {report.cached_blocks:,} in the tree"),
        ("result", "the same" if report.difference is None else str(report.difference)),
    ]
    if not report.is_whole:
        rows.append(("note", "the recording stops inside a line; compared as far as it goes"))
    return Found(f"octavo replay {trace}: events", found, [Table("recording", ("", ""), tuple(rows))])
