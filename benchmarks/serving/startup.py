"""Seconds from starting `octavo serve MODEL` to the first token of an answer, and of `import octavo`.

    python benchmarks/serving/startup.py MODEL [--rounds 5] [--json PATH]

It measures the octavo of the interpreter that runs it.
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
from pathlib import Path

import httpx

PORT = 8124
BODY = {"model": "m", "prompt": "Hello", "max_tokens": 1}


def first_token(model: str) -> float:
    command = [sys.executable, "-m", "octavo.cli.main", "serve", model, "--port", str(PORT), "--served-model-name", "m"]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            assert process.poll() is None, "the server ended"
            try:
                answer = httpx.post(f"http://127.0.0.1:{PORT}/v1/completions", json=BODY, timeout=30)
                answer.raise_for_status()
                return time.perf_counter() - start
            except httpx.ConnectError:
                time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def import_seconds() -> float:
    code = "import time; t = time.perf_counter(); import octavo; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    first = [first_token(arguments.model) for _ in range(arguments.rounds)]
    imports = [import_seconds() for _ in range(arguments.rounds)]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    result = {
        "commit": commit,
        "command": "benchmarks/serving/startup.py",
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "serve_to_first_token_s": {"median": round(statistics.median(first), 3), "all": [round(x, 3) for x in first]},
        "import_octavo_s": {"median": round(statistics.median(imports), 4), "all": [round(x, 4) for x in imports]},
        "goals_s": {"serve_to_first_token": 3.0, "import_octavo": 0.2},
    }
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
