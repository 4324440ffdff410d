"""How much of a decode step is Python: what a step takes outside the kernels, of a real model.

    PYTHONPATH=src python benchmarks/micro/python_share.py MODEL.gguf [--rows 1 8 32] [--json PATH]

Steps of the engine's core in this process, greedy. Each call of a kernel is timed (one layer's or all layers', as the
model makes them), and the rest of the step counts as Python, the timing itself too. Medians of many steps.
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
from typing import Any

from octavo.core.engine_core import EngineCore
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.executor.config import ExecutorConfig
from octavo.llm import load

KERNELS = frozenset(
    {"decoder_layers", "attention_input", "paged_attention", "linear", "gated_mlp", "norm_linear", "draw"}
)
KERNELS |= {"embedding", "rms_norm", "rope_write", "soft_cap"}
PROMPT_TOKENS, WARM_STEPS = 60, 30


class TimedKernels:
    """Passes everything on, and adds up the seconds of `KERNELS`."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kernels, name)
        if name not in KERNELS:
            return found

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            result = found(*args)
            self.seconds += time.perf_counter() - begin
            return result

        setattr(self, name, timed)
        return timed


def decoding_core(path: str, num_rows: int) -> tuple[EngineCore, TimedKernels]:
    model = load(path, executor=ExecutorConfig(kv_cache_memory=256 << 20))
    while model.idle_work is not None and model.idle_work():
        pass
    params = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
    for index in range(num_rows):
        prompt = tuple(range(100 + index, 100 + index + PROMPT_TOKENS))
        model.core.add(Request(f"r{index}", prompt, params, seed=1, eos_token_ids=()))
    ops: Any = model.core._executor._ops  # type: ignore[attr-defined]
    ops._kernels = kernels = TimedKernels(ops._kernels)
    for _ in range(WARM_STEPS):
        model.core.step()
    return model.core, kernels


def measure(path: str, num_rows: int, steps: int) -> dict[str, float]:
    core, kernels = decoding_core(path, num_rows)
    whole, outside = [], []
    for _ in range(steps):
        kernels.seconds = 0.0
        begin = time.perf_counter()
        core.step()
        whole.append(time.perf_counter() - begin)
        outside.append(whole[-1] - kernels.seconds)
    step, python = statistics.median(whole) * 1e6, statistics.median(outside) * 1e6
    return {"rows": num_rows, "step_us": round(step), "python_us": round(python), "share": round(python / step, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    results = []
    for num_rows in arguments.rows:
        results.append(measure(arguments.model, num_rows, arguments.steps))
        print("  ".join(f"{name} {value}" for name, value in results[-1].items()))
    if arguments.json:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        about = {
            "commit": commit,
            "model": Path(arguments.model).name,
            "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        }
        arguments.json.write_text(json.dumps({**about, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
