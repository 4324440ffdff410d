"""What a token costs to draw, microseconds a row: the native sampler and its numpy definition, by settings.

    PYTHONPATH=src python benchmarks/micro/sampler.py [--vocab 49152] [--json PATH]

Logits as a language model has them: a few likely tokens, a long tail. Medians over repetitions in which the cases
alternate; one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import SampleSpec
from octavo.executor.sampler import OpsSampler
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32
from octavo.kernels.reference import ReferenceOps

SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "top_p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "top_k 50": SamplingParams(temperature=0.7, top_k=50),
    "top_k 50, top_p 0.95": SamplingParams(temperature=0.7, top_k=50, top_p=0.95),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "temperature 2, top_p 0.95": SamplingParams(temperature=2.0, top_p=0.95),
}
BATCHES = (1, 16, 64)


def logits_of(rows: int, vocab: int) -> F32:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((rows, vocab)).astype(np.float32) * 2
    for row in logits:
        likely = rng.choice(vocab, 200, replace=False)
        row[likely] += np.sort(rng.exponential(4.0, 200)).astype(np.float32)
    return logits


def measure(samplers: dict[str, OpsSampler], rows: int, vocab: int, repeats: int) -> dict[str, dict[str, float]]:
    logits = logits_of(rows, vocab)
    times: dict[str, dict[str, list[float]]] = {name: {case: [] for case in SETTINGS} for name in samplers}
    for repeat in range(repeats):
        for case, params in SETTINGS.items():
            specs = [SampleSpec(params, seed, repeat) for seed in range(rows)]
            for name, sampler in samplers.items():
                if name == "numpy" and repeat % 10:
                    continue
                start = time.perf_counter()
                sampler(logits, specs)
                times[name][case].append((time.perf_counter() - start) * 1e6 / rows)
    return {name: {case: statistics.median(found) for case, found in cases.items()} for name, cases in times.items()}


def commit_id() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    ops = NativeOps(1)
    samplers = {"native": OpsSampler(ops), "numpy": OpsSampler(ReferenceOps())}
    figures = {}
    for rows in BATCHES:
        some = samplers if rows == 1 else {"native": samplers["native"]}
        figures[f"{rows} rows"] = measure(some, rows, arguments.vocab, max(10, arguments.repeats // rows))
    for title, found in figures.items():
        for name, cases in found.items():
            print(f"\n{title}, {name}")
            for case, value in cases.items():
                print(f"  {case:<28}{value:>10.1f}")
    if arguments.json is not None:
        about = {
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "instruction_set": ops.instruction_set,
            "vocab": arguments.vocab,
            "commit": commit_id(),
            "command": "micro/sampler.py",
        }
        arguments.json.write_text(json.dumps({"about": about, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
