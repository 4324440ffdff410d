"""Run the workloads on octavo and on every peer that is named, alternating, and store medians and ratios.

    python benchmarks/serving/compare.py MODEL.gguf --rounds 3 --peer openvino=PYTHON --peer llama.cpp=PYTHON \
        --peer vllm=PYTHON:MODEL_DIRECTORY --peer transformers=PYTHON:MODEL_DIRECTORY --peer any=URL \
        --out benchmarks/results/serving_int8.json

PYTHON is an interpreter with the peer installed. One server runs at a time; each round starts it anew and runs
every workload in a process of its own. The settings of each peer are in the result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
WORKLOADS = ["single", "prefill", "batch", "shared", "turns", "long"]
# workload -> (figure, higher is better)
FIGURES = {"single": ("out_tok_s", True), "batch": ("out_tok_s", True)}
PORT = 8123


@dataclass(slots=True)
class Engine:
    name: str
    command: list[str]  # empty: a server that runs already
    url: str
    version: str
    environment: dict[str, str] = field(default_factory=dict)
    model: str = "m"
    rounds: list[dict[str, Any]] = field(default_factory=list)


def version_of(python: str, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def make_octavo(python: str, model: str, flags: str = "") -> Engine:
    # `-m octavo.cli.main` rather than the script, so that a checkout can be measured with PYTHONPATH
    command = [python, "-m", "octavo.cli.main", "serve", model, "--port", str(PORT), "--served-model-name", "m"]
    name = f"octavo {flags}".strip()
    return Engine(name, [*command, *flags.split()], f"http://127.0.0.1:{PORT}", version_of(python, "octavo"))


def make_engine(spec: str, model: str) -> Engine:
    name, _, where = spec.partition("=")
    url = f"http://127.0.0.1:{PORT}"
    if where.startswith("http"):
        return Engine(name, [], where, "unknown")
    python, _, other_model = where.partition(":")
    if name == "openvino":
        command = [python, str(HERE / "peers" / "openvino_server.py"), model, str(PORT)]
        return Engine(name, command, url, version_of(python, "openvino-genai"))
    if name == "llama.cpp":
        command = [python, "-m", "llama_cpp.server", "--model", model, "--port", str(PORT), "--n_ctx", "8192"]
        return Engine(name, [*command, "--n_threads", str(os.cpu_count())], url, version_of(python, "llama-cpp-python"))
    if name == "vllm":
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", other_model, "--port", str(PORT)]
        command += [
            "--served-model-name",
            "m",
            "--dtype",
            "bfloat16",
            "--max-model-len",
            "8192",
            "--enable-prefix-caching",
        ]
        # without the second it keeps a core for itself that its kernels do not use, half of two
        environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}
        return Engine(name, command, url, version_of(python, "vllm-cpu"), environment)
    if name == "transformers":
        command = [python, str(HERE / "peers" / "transformers_server.py"), other_model, str(PORT)]
        return Engine(name, command, url, version_of(python, "transformers"))
    raise SystemExit(f"unknown peer {name!r}: openvino, llama.cpp, vllm, transformers, or NAME=URL")


def wait_ready(url: str, process: subprocess.Popen[bytes] | None, limit: float = 300) -> float:
    start = time.monotonic()
    while time.monotonic() - start < limit:
        if process is not None and process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}")
        for path in ("/health", "/v1/models"):
            try:
                if httpx.get(url + path, timeout=2).status_code == 200:
                    return time.monotonic() - start
            except httpx.HTTPError:
                pass
        time.sleep(0.05)
    raise SystemExit(f"{url} was not ready after {limit} s")


def run_round(engine: Engine, workloads: list[str], log: Path) -> dict[str, Any]:
    process = None
    if engine.command:
        environment = {**os.environ, **engine.environment}
        with log.open("ab") as out:
            process = subprocess.Popen(engine.command, stdout=out, stderr=out, env=environment, start_new_session=True)
    result: dict[str, Any] = {}
    try:
        result["load_s"] = round(wait_ready(engine.url, process), 2)
        for name in workloads:
            command = [sys.executable, str(HERE / "client.py"), engine.url, engine.model, name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
            result[name] = (
                json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr.strip().rpartition("\n")[2]}
            )
            print(engine.name, done.stdout.strip() or done.stderr[-300:], flush=True)
        if process is not None:
            result["peak_rss_bytes"] = peak_rss(process.pid)
    finally:
        if process is not None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return result


def peak_rss(pid: int) -> int | None:
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return None
    line = next((x for x in status.read_text().splitlines() if x.startswith("VmHWM")), None)
    return int(line.split()[1]) * 1024 if line else None


def figure(name: str, rounds: list[dict[str, Any]]) -> float | None:
    key = FIGURES.get(name, ("seconds", False))[0]
    values = [r[name][key] for r in rounds if key in r.get(name, {})]
    return round(statistics.median(values), 3) if values else None


def rooflines(python: str, model: str) -> dict[str, Any]:
    """What the machine allows now; see roofline.py."""
    done = subprocess.run([python, str(HERE / "roofline.py"), model], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def summarise(engines: list[Engine], workloads: list[str], roofs: list[dict[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name in workloads:
        higher = FIGURES.get(name, ("seconds", False))[1]
        row: dict[str, Any] = {e.name: figure(name, e.rounds) for e in engines}
        peers = [v for k, v in row.items() if not k.startswith("octavo") and v is not None]
        # the fastest that was probed in this run: the strictest
        roof = [one["workloads"][name]["out_tok_s" if higher else "seconds"] for one in roofs]
        row["roofline"] = round(max(roof) if higher else min(roof), 3)
        for engine in engines:
            ours = row[engine.name]
            if not engine.name.startswith("octavo") or not ours:
                continue
            of = "" if engine.name == "octavo" else f" of {engine.name}"
            if peers:
                best = max(peers) if higher else min(peers)
                row[f"speed_against_best_peer{of}"] = round(ours / best if higher else best / ours, 2)
            row[f"share_of_roofline{of}"] = round(ours / row["roofline"] if higher else row["roofline"] / ours, 2)
        row["unit"] = "output tokens/s" if higher else "s"
        table[name] = row
    return table


def machine() -> dict[str, Any]:
    info: dict[str, Any] = {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = dict(x.split(":", 1) for x in cpuinfo.read_text().split("\n\n")[0].splitlines() if ":" in x)
        wanted = {k.strip(): v.strip() for k, v in lines.items()}
        info["cpu"] = {k: wanted.get(k) for k in ("model name", "cpu family", "model")}
        info["flags"] = [f for f in wanted.get("flags", "").split() if f.startswith(("avx", "amx"))]
    return info


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--octavo", default=sys.executable, help="interpreter that has octavo")
    parser.add_argument(
        "--octavo-flags", action="append", default=[], metavar="FLAGS", help="octavo again, served with these flags"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON[:MODEL]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--skip", action="append", default=[], metavar="PEER:WORKLOAD", help="what takes too long")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    workloads = arguments.workload or WORKLOADS
    engines = [make_octavo(arguments.octavo, arguments.model, flags) for flags in ["", *arguments.octavo_flags]]
    engines += [make_engine(spec, arguments.model) for spec in arguments.peer]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    roofs = []
    for index in range(arguments.rounds):
        roofs.append(rooflines(arguments.octavo, arguments.model))
        for engine in engines:
            wanted = [w for w in workloads if f"{engine.name}:{w}" not in arguments.skip]
            print(f"round {index + 1} of {arguments.rounds}: {engine.name}", flush=True)
            engine.rounds.append(run_round(engine, wanted, arguments.out.with_suffix(f".{engine.name}.log")))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    result = {
        "commit": commit.stdout.strip(),
        "command": "compare.py " + " ".join(Path(a).name if "/" in a else a for a in sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "medians": summarise(engines, workloads, roofs),
        "rooflines": roofs,
        "load_s": {e.name: statistics.median(r["load_s"] for r in e.rounds) for e in engines},
        "engines": {
            e.name: {
                "version": e.version,
                "settings": [Path(a).name if "/" in a and "//" not in a else a for a in e.command],
                "environment": e.environment,
                "rounds": e.rounds,
            }
            for e in engines
        },
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["medians"], indent=1))


if __name__ == "__main__":
    main()
