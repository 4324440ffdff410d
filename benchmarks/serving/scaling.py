"""How octavo scales: tokens/s by batch, time a token by context, time to the first token by what is cached.

    PYTHONPATH=src python benchmarks/serving/scaling.py MODEL --out benchmarks/results/scaling.json

Steps of the engine's core in this process, without HTTP; greedy, so that all points do the same work. Repetitions go
round all points in turn, and each figure is a median of them: a busy neighbour then spoils a round, not a curve.
The chart (an SVG beside the JSON) needs matplotlib: `pip install 'octavo[plots]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import octavo
from octavo.core.engine_core import EngineCore
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (512, 1024, 2048, 4096, 8192)
CACHED_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
CACHED_BEFORE = (0, 1024, 2048, 4096, 7168)  # tokens cached in front of as many new ones
PROMPT_TOKENS = 2048
NEW_TOKENS = 256
BATCH_PROMPT_TOKENS = 48
DECODE_STEPS = 16
METHOD = (
    "medians over repetitions that go round all points in turn; the machine is shared, so absolute figures are lower "
    "bounds and the shape of a curve is what to read"
)


class Bench:
    """One engine core; every call leaves it without requests, with what it computed in the cache."""

    def __init__(self, model: str, seed: int) -> None:
        self.llm = octavo.LLM(model, kv_cache_memory=1 << 30, max_num_seqs=64, max_num_batched_tokens=2048)
        self._core: EngineCore = self.llm.model.core
        self._chance = random.Random(seed)
        self._num_requests = 0

    def tokens(self, count: int) -> list[int]:
        """Never the same again, so that nothing is cached by chance."""
        return [self._chance.randrange(100, self.llm.model.vocab_size) for _ in range(count)]

    def decode_s(self, prompts: list[list[int]]) -> float:
        """Seconds of a step in which each of these draws one token: a median of some steps."""
        requests = [self._add(prompt, 4096) for prompt in prompts]
        while any(request.num_output_tokens < 2 for request in requests):
            self._core.step()
        times = [self._step_s() for _ in range(DECODE_STEPS)]
        self._end(requests)
        return statistics.median(times)

    def first_token_s(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds until the first token is drawn, and how many tokens of the prompt were cached."""
        request = self._add(prompt, 16)
        seconds = 0.0
        while not request.num_output_tokens:
            seconds += self._step_s()
        self._end([request])
        return seconds, request.num_cached_tokens

    def forget(self) -> None:
        self._core.reset_prefix_cache()

    def _add(self, prompt: list[int], max_tokens: int) -> Request:
        self._num_requests += 1
        room = min(max_tokens, self.llm.model.max_model_len - len(prompt))
        params = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)
        request = Request(f"r{self._num_requests}", prompt, params, seed=0)
        self._core.add(request)
        return request

    def _step_s(self) -> float:
        start = time.perf_counter()
        self._core.step()
        return time.perf_counter() - start

    def _end(self, requests: list[Request]) -> None:
        for request in requests:
            self._core.finish(request.request_id, 0)


def points(bench: Bench) -> dict[str, dict[str, Callable[[], dict[str, float]]]]:
    """section -> point -> what measures it once."""

    def batch(count: int) -> dict[str, float]:
        step_s = bench.decode_s([bench.tokens(BATCH_PROMPT_TOKENS) for _ in range(count)])
        return {"batch": count, "step_ms": step_s * 1e3, "tokens_per_s": count / step_s}

    def context(length: int) -> dict[str, float]:
        prompt = bench.tokens(min(length, bench.llm.model.max_model_len - DECODE_STEPS - 4))
        return {"context": len(prompt), "ms_per_token": bench.decode_s([prompt]) * 1e3}

    def share(cached: float) -> dict[str, float]:
        prompt = bench.tokens(PROMPT_TOKENS)
        if cached:
            bench.first_token_s(prompt[: int(PROMPT_TOKENS * cached)])
        seconds, hits = bench.first_token_s(prompt)
        return {"cached_share": hits / PROMPT_TOKENS, "first_token_ms": seconds * 1e3}

    def before(cached: int) -> dict[str, float]:
        prompt = bench.tokens(cached + NEW_TOKENS)
        if cached:
            bench.first_token_s(prompt[:cached])
        seconds, hits = bench.first_token_s(prompt)
        return {"cached_tokens": hits, "first_token_ms": seconds * 1e3}

    def all_of(values: tuple[Any, ...], measure: Callable[[Any], dict[str, float]]) -> dict[str, Any]:
        return {str(value): (lambda value=value: measure(value)) for value in values}

    return {
        "tokens_per_s_by_batch": all_of(BATCHES, batch),
        "time_per_token_by_context": all_of(CONTEXTS, context),
        f"first_token_of_{PROMPT_TOKENS}_by_cached_share": all_of(CACHED_SHARES, share),
        f"first_token_of_{NEW_TOKENS}_new_by_cached_tokens": all_of(CACHED_BEFORE, before),
    }


def measure(bench: Bench, repeats: int) -> Iterator[dict[str, list[dict[str, float]]]]:
    """The medians after each repetition, so that a run that is cut short leaves what it has."""
    sections = points(bench)
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in sections}
    for repeat in range(repeats):
        for name, each in sections.items():
            for point, run in each.items():
                bench.forget()
                found[name].setdefault(point, []).append(run())
        print(f"repetition {repeat + 1} of {repeats} done, load {os.getloadavg()[0]:.1f}", flush=True)
        yield {
            name: [{key: statistics.median(run[key] for run in runs) for key in runs[0]} for runs in each.values()]
            for name, each in found.items()
        }


def draw(sections: dict[str, list[dict[str, float]]], file: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "octavo"
    from matplotlib import pyplot

    labels = {
        "batch": "requests at once",
        "tokens_per_s": "tokens/s",
        "context": "context, tokens",
        "ms_per_token": "ms a token",
        "cached_share": f"cached share of {PROMPT_TOKENS} tokens",
        "cached_tokens": f"cached tokens before {NEW_TOKENS} new ones",
        "first_token_ms": "ms to the first token",
    }
    figure, axes = pyplot.subplots(1, len(sections), figsize=(4 * len(sections), 3.2), layout="constrained")
    for axis, found in zip(axes, sections.values(), strict=True):
        (x, *_, y) = found[0]
        axis.plot([point[x] for point in found], [point[y] for point in found], marker="o")
        axis.set_xlabel(labels[x])
        axis.set_ylabel(labels[y])
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        if x == "batch":
            axis.set_xscale("log", base=2)
            axis.set_xticks(BATCHES, [str(count) for count in BATCHES])
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, metadata={"Date": None})


def commit_id() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file; the chart goes beside it")
    parser.add_argument("--draw-only", action="store_true", help="draw the chart of a JSON file that is there")
    arguments = parser.parse_args()
    if not arguments.draw_only:
        loads = [os.getloadavg()[0]]
        bench = Bench(arguments.model, seed=1)
        model = bench.llm.model
        about: dict[str, Any] = {
            "model": Path(arguments.model).name,
            "method": METHOD,
            "repeats": 0,
            "loads": loads,
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": model.num_threads,
            "instruction_set": model.instruction_set,
            "weights_dtype": model.weights_dtype,
            "kv_cache_dtype": model.kv_cache_dtype,
            "python": platform.python_version(),
            "commit": commit_id(),
            "command": f"serving/scaling.py MODEL --repeats {arguments.repeats}",
        }
        for sections in measure(bench, arguments.repeats):
            about["repeats"] += 1
            loads.append(os.getloadavg()[0])
            arguments.out.write_text(json.dumps({"about": about, "figures": sections}, indent=1) + "\n")
    result = json.loads(arguments.out.read_text())
    about = result["about"]
    title = f"{about['model']}, {about['cores']} cores ({about['instruction_set']}), commit {about['commit']}"
    draw(result["figures"], arguments.out.with_suffix(".svg"), title)


if __name__ == "__main__":
    main()
