"""What replays cost: the curve of a trace, requests a second of a timed replay, the live curve, ten million requests.

    python benchmarks/micro/replay.py [--trace MOONCAKE.jsonl.gz] [--ten-million | --only-ten-million] [--json PATH]

The ten million are those of

    octavo replay generate:talks,requests=10000000,talks=20000,turns=4,system=32,prompt=16,output=16,block=16 \
        --sample 0.02 --max-blocks 200000 --cache-blocks 100000

with the memory of the process looked at after each million. Figures that are not measured again stay in the file.

Seconds are of the wall clock and of this process; on a busy machine only the latter mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.core.config import SchedulerConfig
from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.replay.cache_study import CacheStudy, CacheStudyConfig
from octavo.replay.cost_model import CostModel
from octavo.replay.generated import generate
from octavo.replay.lines import BadLines
from octavo.replay.live_curve import LiveCurve
from octavo.replay.timed import TimedConfig, TimedReplay
from octavo.replay.trace import TraceRequest
from octavo.replay.trace_formats import read_trace

SPEC = KVSpec((KVGroupSpec("full", (0,), 1, 64, "bf16"),), 16)
COST = CostModel("some", 0.0, 1e-6, 0.0, 0.0, 0.0, 0.0, 1e-3)
LENGTH = 2000  # tokens of a request, its answer among them
TEN_MILLION = 10_000_000

Figures = dict[str, Any]


def timed(work: Callable[[], Any]) -> tuple[Any, Figures]:
    wall, process = time.perf_counter(), time.process_time()
    found = work()
    return found, {"wall_s": time.perf_counter() - wall, "process_s": time.process_time() - process}


def curve_of(source: str, **config: Any) -> Figures:
    def work() -> Any:
        study = CacheStudy(CacheStudyConfig(**config))
        for request in read_trace(source, BadLines(skip=True)):
            study.add(request)
        return study.report()

    report, seconds = timed(work)
    return {"requests": report.requests, "blocks": report.blocks, "hit_rate": report.unlimited.hit_rate, **seconds}


def timed_replay(output: int, *, may_coast: bool, apart_s: float = 0.0) -> Figures:
    """Requests that share nothing but a block, 100 kinds of them; all at once, or `apart_s` apart on an average."""
    count, chance, now, trace = 1000, random.Random(1), 0.0, []
    for at in range(count):
        now += chance.expovariate(1 / apart_s) if apart_s else 0.0
        names = [1, *range(1000 + at % 100 * 1000, 1124 + at % 100 * 1000)]
        trace.append(TraceRequest(now, LENGTH - output, output, names, 16))
    replay = TimedReplay(TimedConfig(SchedulerConfig(256, 8192, 4096), SPEC, 20_000, may_coast=may_coast), COST)
    report, seconds = timed(lambda: replay.run(trace))
    return {"steps": report.status.steps, "duration_s": report.duration_s, **seconds}


def timed_replays(repetitions: int) -> list[Figures]:
    """With and without coasting in turn (core.coasting), the median of each; virtual times must agree."""
    found = []
    for output, apart_s in ((1, 0.0), (8, 0.0), (32, 0.0), (128, 0.0), (128, 0.002), (512, 0.0)):
        runs: dict[bool, list[Figures]] = {True: [], False: []}
        for _ in range(repetitions):
            for may_coast in (True, False):
                runs[may_coast].append(timed_replay(output, may_coast=may_coast, apart_s=apart_s))
        assert len({(run["steps"], run["duration_s"]) for of_kind in runs.values() for run in of_kind}) == 1
        rates = {on: [1000 / run["process_s"] for run in of_kind] for on, of_kind in runs.items()}
        one: Figures = {"output": output, "arrivals": "one by one" if apart_s else "at once"}
        one |= {"requests_per_process_s": statistics.median(rates[True])}
        one |= {"every_row_written": statistics.median(rates[False]), "steps": runs[True][0]["steps"]}
        found.append({**one, "all": rates[True], "all_every_row_written": rates[False]})
    return found


def live_curve() -> Figures:
    trace = list(generate("generate:talks,requests=500,talks=40,turns=6,system=512,output=64,rate=50"))
    spent = {}
    for name in ("without", "with"):
        replay = TimedReplay(TimedConfig(SchedulerConfig(64, 2048, 4096), SPEC, 3000), COST)
        if name == "with":
            LiveCurve(replay.core)
        report, seconds = timed(lambda one=replay: one.run(trace))
        spent[name] = seconds["process_s"]
    added = (spent["with"] - spent["without"]) / report.status.processed_tokens
    return {"added_us_per_token": added * 1e6, "tokens": report.status.processed_tokens, **spent}


def ten_million() -> Figures:
    settings = "talks=20000,turns=4,system=32,prompt=16,output=16,block=16"
    limits: Figures = {"sample": 0.02, "max_blocks": 200_000, "asked_blocks": 100_000}
    study, resident = CacheStudy(CacheStudyConfig(**limits)), []

    def work() -> Any:
        for number, request in enumerate(generate(f"generate:talks,requests={TEN_MILLION},{settings}"), 1):
            study.add(request)
            if number % (TEN_MILLION // 10) == 0:
                resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return study.report()

    report, seconds = timed(work)
    return {
        "requests": report.requests,
        "blocks": report.blocks,
        "hit_rate_at_100000_blocks": report.at.hit_rate,
        "hit_rate_error": report.at.hit_rate_error,
        **seconds,
        "max_rss_bytes_after_each_million": resident,
        "load_average": os.getloadavg()[0],
        "settings": {"talks": settings, **limits},
        "commit": commit_id(),
        "command": "micro/replay.py --only-ten-million",
    }


def commit_id() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="a Mooncake trace, for the curve of a real one")
    parser.add_argument("--repetitions", type=int, default=5, help="of the timed replays; the median counts")
    parser.add_argument("--ten-million", action="store_true", help="ten million requests that are made up; minutes")
    parser.add_argument("--only-ten-million", action="store_true", help="those, and nothing else")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    figures: Figures = {}
    if arguments.ten_million or arguments.only_ten_million:
        figures["ten million"] = ten_million()  # first: the most memory that a process had does not go down
    if not arguments.only_ten_million:
        source = "generate:talks,requests=12000,talks=300,block=512,system=512,prompt=4096"
        figures["curve of 12,000 made up"] = curve_of(source)
        figures["timed"] = timed_replays(arguments.repetitions)
        figures["live curve"] = live_curve()
    if arguments.trace:
        figures["curve"] = {"trace": Path(arguments.trace).name, **curve_of(arguments.trace)}
    found = {"about": about(), "figures": figures}
    print(json.dumps(found, indent=1))
    if arguments.json is not None:
        if arguments.json.exists():
            known = json.loads(arguments.json.read_text())
            found["figures"] = {**known["figures"], **figures}
            if arguments.only_ten_million:
                found["about"] = known["about"]
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def about() -> Figures:
    return {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "commit": commit_id(),
        "command": "micro/replay.py",
    }


if __name__ == "__main__":
    main()
