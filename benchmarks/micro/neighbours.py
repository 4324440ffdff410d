"""How decode speed suffers beside busy neighbours (F25), and the micro benchmark's JSON.

    python benchmarks/micro/neighbours.py MODEL.gguf [--json PATH]

A decode of 64 tokens is timed alone, beside one and beside two busy processes, in turn, several rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import octavo

NUM_TOKENS = 64


def seconds_per_token(llm: octavo.LLM) -> float:
    params = octavo.SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    llm.generate("The history of the world is long and", params)
    return (time.perf_counter() - start) / NUM_TOKENS


def beside(count: int, llm: octavo.LLM) -> float:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.2)
        return seconds_per_token(llm)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    times: dict[int, list[float]] = {0: [], 1: [], 2: []}
    with octavo.LLM(arguments.model, kv_cache_memory=2**27) as llm:
        seconds_per_token(llm)
        for _ in range(arguments.rounds):
            for count, found in times.items():
                found.append(beside(count, llm))
    medians = {count: statistics.median(found) for count, found in times.items()}
    result = {
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
        "ms_per_token": {str(count): round(1e3 * value, 3) for count, value in medians.items()},
        "slow_down": {str(count): round(value / medians[0], 2) for count, value in medians.items()},
        "goal": {"1": 1.6, "2": 2.5},
    }
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
