"""What `GET /v1/kv/mrc` estimates on loads that a real server had, beside what caches of those sizes really hit.

    python benchmarks/micro/live_curve.py MODEL --record FOLDER [--live SCALE ...] [--recorded] [--json PATH]

Each load is sent to `octavo serve MODEL --record`: words that are made up, answers of the model. The curve is asked for
at the end. Then the recording is done again by the engine's scheduler, block manager and radix tree at each size, with
an executor that takes as long as the recorded steps took; with --live a server of that size has the load once more.
With --recorded no server is started: recordings of an earlier run are there, and the curve hears their events again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import random
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.replay.cost_fit import fit
from octavo.replay.lines import BadLines, read_lines
from octavo.replay.live_curve import SCALES, LiveCurve
from octavo.replay.recording import RecordingReplay, requests_of
from octavo.replay.timed import TimedConfig, TimedReplay

Figures = dict[str, Any]

WORDS = (
    "river stone bridge window market garden letter winter table music doctor engine forest island paper silver "
    "village morning captain kitchen teacher mirror candle harbor shadow ticket valley copper basket feather"
).split()
CLIENTS = 6
MAX_MODEL_LEN = 640
ANSWER = 12
KEPT = ("evicted_blocks", "preemptions", "queries_tokens", "hit_tokens")
BLOCK_BYTES = 16 * 30 * 2 * 3 * 64 * 2  # of SmolLM2-135M: tokens, layers, K and V, heads, numbers, bytes


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says next; the server's answers so far go before it."""

    user: int
    system: str
    text: str


@dataclass(frozen=True, slots=True)
class Load:
    turns: list[Turn]
    num_blocks: int  # of the cache that is recorded


def words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(count))


def shared_beginnings(count: int) -> list[Turn]:
    """Many users, each once; a few long instructions, some of them common, that all begin with."""
    chance = random.Random(1)
    systems = [f"Assistant {at}. {words(chance, chance.randrange(100, 260))}" for at in range(20)]
    weights = [1 / (at + 1) for at in range(len(systems))]
    picked = chance.choices(systems, weights, k=count)
    return [Turn(at, one, words(chance, chance.randrange(8, 50))) for at, one in enumerate(picked)]


def talks(count: int) -> list[Turn]:
    """Users that come back, up to five times, between others."""
    chance, found = random.Random(2), []
    open_talks: list[list[int]] = []
    users = 0
    while len(found) < count:
        while len(open_talks) < 24:
            open_talks.append([users, chance.randrange(1, 6)])
            users += 1
        talk = open_talks[min(int(chance.expovariate(0.12)), len(open_talks) - 1)]
        found.append(Turn(talk[0], "You are helpful.", words(chance, chance.randrange(15, 70))))
        talk[1] -= 1
        if not talk[1]:
            open_talks.remove(talk)
    return found


def strangers(count: int) -> list[Turn]:
    """Questions with nothing in common, of which some are asked again, often soon and sometimes late."""
    chance, found = random.Random(3), []
    for at in range(count):
        if found and chance.random() < 0.55:
            back = min(1 + int(chance.paretovariate(0.7) * 3), len(found))
            found.append(Turn(at, "", found[-back].text))
        else:
            found.append(Turn(at, "", words(chance, chance.randrange(40, 160))))
    return found


LOADS = {"shared beginnings": shared_beginnings, "talks": talks, "strangers": strangers}


@contextmanager
def serving(model: str, num_blocks: int, *flags: str) -> Iterator[str]:
    """The address of a server, which has ended well when this is left."""
    size = ("--kv-cache-memory", str(num_blocks * BLOCK_BYTES), "--kv-cache-dtype", "bf16", "--block-size", "16")
    limits = ("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "6", "--max-num-batched-tokens", "512")
    command = [sys.executable, "-m", "octavo.cli.main", "serve", model, "--served-model-name", "m", "--port", "0"]
    process = subprocess.Popen([*command, *size, *limits, *flags], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("ready: "):
                break
        else:
            raise SystemExit("the server did not start")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield line.split()[1].removesuffix("/v1")
        process.send_signal(signal.SIGTERM)
        if process.wait(timeout=120):
            raise SystemExit(f"the server ended with {process.returncode}")
    finally:
        process.kill()


def ask(url: str, body: Figures | None = None) -> Figures:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def send(url: str, turns: list[Turn]) -> None:
    """By a few clients, in order; a user's turn waits for the answer to the one before."""
    waiting: queue.SimpleQueue[tuple[Turn, Future[list[Figures]] | None, Future[list[Figures]]]] = queue.SimpleQueue()
    last: dict[int, Future[list[Figures]]] = {}
    for turn in turns:
        mine: Future[list[Figures]] = Future()
        waiting.put((turn, last.get(turn.user), mine))
        last[turn.user] = mine

    def work() -> None:
        while True:
            try:
                turn, before, mine = waiting.get_nowait()
            except queue.Empty:
                return
            said = [{"role": "system", "content": turn.system}] if turn.system else []
            said = [*(said if before is None else before.result()), {"role": "user", "content": turn.text}]
            body = {"model": "m", "messages": said, "max_tokens": ANSWER, "temperature": 0}
            answer = ask(f"{url}/v1/chat/completions", body)["choices"][0]["message"]
            mine.set_result([*said, {"role": "assistant", "content": answer["content"]}])

    clients = [threading.Thread(target=work) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()


def live_run(model: str, load: Load, num_blocks: int, *flags: str) -> Figures:
    with serving(model, num_blocks, *flags) as url:
        send(url, load.turns)
        curve, status = ask(f"{url}/v1/kv/mrc"), ask(f"{url}/v1/kv/status")
    return {**curve, "status": {name: status[name] for name in KEPT}, "requests": len(load.turns)}


def again(recording: Path) -> Figures:
    """What the server said, from its recording: a curve that hears the same events counts and estimates the same."""
    lines = read_lines(str(recording), BadLines())
    replay = RecordingReplay(json.loads(next(lines).text))
    curve = LiveCurve(replay.core)
    report = replay.run(lines)
    if not report.is_same:
        raise SystemExit(f"{recording}: {report.difference}")
    found, status = curve.snapshot(), replay.core.status()
    return {
        "num_blocks": found.num_blocks,
        "lookup_blocks": found.lookup_blocks,
        "hit_rate": found.hit_rate,
        "curve": [{"blocks": one.blocks, "hit_rate": one.hit_rate} for one in found.estimates],
        "status": {name: getattr(status, name) for name in KEPT},
        "requests": report.requests,
    }


def rerun(recording: Path, num_blocks: int) -> float | None:
    """The hit rate of the recorded load in a cache of another size; None where a request has no room in it."""
    lines = read_lines(str(recording), BadLines())
    recorded = RecordingReplay(json.loads(next(lines).text))
    recorded.run(lines)
    config = TimedConfig(recorded.core.scheduler.config, recorded.blocks.spec, num_blocks)
    replay = TimedReplay(config, fit(recorded.measured_steps, "recorded").cost)
    curve = LiveCurve(replay.core)  # for what it counts; not for what it estimates
    lines = read_lines(str(recording), BadLines())
    next(lines)
    report = replay.run(requests_of(lines))
    return None if report.refused else curve.snapshot().hit_rate


def compare(model: str, name: str, load: Load, recording: Path, live_scales: list[float] | None) -> Figures:
    """live_scales None: it is recorded already."""
    if live_scales is None:
        found = again(recording)
    else:
        found = live_run(model, load, load.num_blocks, "--record", str(recording))
    measured = found["hit_rate"]
    rows = []
    for scale, point in zip(SCALES, found["curve"], strict=True):
        row = {"scale": scale, "blocks": point["blocks"], "estimated": point["hit_rate"]}
        row["rerun"] = rerun(recording, point["blocks"])
        if scale in (live_scales or ()):
            row["live_rerun"] = live_run(model, load, point["blocks"])["hit_rate"]
        rows.append(row)
    return {
        "about": LOADS[name].__doc__,
        "requests": found["requests"],
        "num_blocks": found["num_blocks"],
        "lookup_blocks": found["lookup_blocks"],
        "measured": measured,
        **found["status"],
        "error_at_1x": next(row["estimated"] for row in rows if row["scale"] == 1.0) - measured,
        "rows": rows,
    }


def commit_id() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--record", type=Path, required=True, help="the folder for the recordings")
    parser.add_argument("--live", type=float, nargs="*", default=[], help="scales at which a server has the load again")
    parser.add_argument("--recorded", action="store_true", help="take the recordings that are in the folder")
    parser.add_argument("--requests", type=int, default=300, help="of each load")
    parser.add_argument("--blocks", type=int, default=180, help="of the cache that is recorded")
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    arguments.record.mkdir(parents=True, exist_ok=True)
    figures = {}
    for name in arguments.loads:
        load = Load(LOADS[name](arguments.requests), arguments.blocks)
        recording = arguments.record / f"{name.replace(' ', '_')}.jsonl.gz"
        live = None if arguments.recorded else arguments.live
        figures[name] = compare(arguments.model, name, load, recording, live)
        print(json.dumps({name: figures[name]}, indent=1), flush=True)
    about = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "model": Path(arguments.model).name,
        "commit": commit_id(),
        "command": "micro/live_curve.py",
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"about": about, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
