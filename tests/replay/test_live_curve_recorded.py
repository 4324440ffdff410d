"""The live curve on a load that a real server had: `benchmarks/micro/live_curve.py SMOLLM2 --loads talks --requests 90
--blocks 80` recorded it. What it estimated then, it estimates again when the recording is done again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.core.cache_curve import CacheCurve
from octavo.replay.cost_fit import fit
from octavo.replay.lines import BadLines, NumberedLine, read_lines
from octavo.replay.live_curve import LiveCurve
from octavo.replay.recording import RecordingReplay, requests_of
from octavo.replay.timed import TimedConfig, TimedReplay

RECORDING = Path(__file__).parent / "data" / "talks_of_smollm2.jsonl.gz"
NUM_BLOCKS = 80


def opened() -> tuple[RecordingReplay, Iterator[NumberedLine]]:
    lines = read_lines(str(RECORDING), BadLines())
    return RecordingReplay(json.loads(next(lines).text)), lines


@functools.cache
def live() -> tuple[CacheCurve, RecordingReplay]:
    replay, lines = opened()
    curve = LiveCurve(replay.core)
    report = replay.run(lines)
    assert report.is_same, report.difference
    assert report.events["evict"] > 100
    assert report.requests == 90
    return curve.snapshot(), replay


def rerun(num_blocks: int) -> float:
    """What the same scheduler hits with a cache of another size, in virtual time at the recorded pace."""
    recorded = live()[1]
    config = TimedConfig(recorded.core.scheduler.config, recorded.blocks.spec, num_blocks)
    replay = TimedReplay(config, fit(recorded.measured_steps, "recorded").cost)
    curve = LiveCurve(replay.core)
    assert replay.run(requests_of(opened()[1])).refused == 0
    return curve.snapshot().hit_rate


def test_at_todays_size_it_says_what_was_measured() -> None:
    curve = live()[0]
    at_one = next(one for one in curve.estimates if one.scale == 1.0)
    assert at_one.blocks == curve.num_blocks == NUM_BLOCKS
    assert curve.hit_rate == pytest.approx(0.3198, abs=0.0001), "what GET /v1/kv/mrc of the server said"
    assert at_one.hit_rate == pytest.approx(curve.hit_rate, abs=0.02)


@pytest.mark.parametrize("scale", [0.5, 2.0, 4.0])
def test_at_another_size_it_says_what_the_load_gives_there(scale: float) -> None:
    predicted = next(one for one in live()[0].estimates if one.scale == scale)
    assert predicted.hit_rate == pytest.approx(rerun(round(scale * NUM_BLOCKS)), abs=0.03)
