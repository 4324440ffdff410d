"""The Python share of a decode step: time in `ModelExecutor.execute` outside the model's forward, by number of rows.

    PYTHONPATH=src python benchmarks/micro/step.py

The model is a stand-in that returns the same logits at once, so that what is left is batch building, copies, sampling
and bookkeeping. Prints microseconds: the median of many steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import Row, SampleSpec, StepPlan
from octavo.executor.batch import build_batch
from octavo.executor.kv_storage import KVStorage
from octavo.executor.model_executor import ModelExecutor
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32

VOCAB_SIZE = 49_152
NUM_BLOCKS = 6_400
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "top_k 40": SamplingParams(top_k=40),
    "penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.1),
}


@dataclass(frozen=True)
class _Config:
    vocab_size: int


class InstantModel:
    """The same peaked logits for every row, at no cost."""

    def __init__(self, num_rows: int) -> None:
        self.config = _Config(VOCAB_SIZE)
        noise = np.random.default_rng(0).gumbel(size=(num_rows, VOCAB_SIZE)) * 2.5
        self._logits = noise.astype(np.float32)

    def forward(self, *inputs: Any) -> F32:
        return self._logits[: len(inputs[-1])]


def decode_rows(num_rows: int, table_blocks: int, params: SamplingParams) -> tuple[Row, ...]:
    tables = [array("i", range(i * table_blocks, (i + 1) * table_blocks)) for i in range(num_rows)]
    start = table_blocks * 16 - 1
    return tuple(Row(f"r{i}", start, (17 + i,), (tables[i],), SampleSpec(params, i, 5)) for i in range(num_rows))


def median_us(action: object, repeats: int) -> float:
    assert callable(action)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--table-blocks", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    spec = KVSpec((KVGroupSpec("full", (0,), 1, 16, "bf16"),), 16)
    storage = KVStorage(spec, NUM_BLOCKS)
    results = []
    for num_rows in (1, 8, 64):
        executor = ModelExecutor(InstantModel(num_rows), NativeOps(1), storage)
        greedy_rows = decode_rows(num_rows, arguments.table_blocks, SAMPLING["greedy"])
        result = {"rows": num_rows, "batch": median_us(lambda: build_batch(greedy_rows, 16), arguments.repeats)}  # noqa: B023
        for name, params in SAMPLING.items():
            plan = StepPlan(0, (), decode_rows(num_rows, arguments.table_blocks, params))
            result[name] = median_us(lambda: executor.execute(plan), arguments.repeats)  # noqa: B023
        results.append(result)
    if arguments.json:
        print(json.dumps(results))
        return
    print("microseconds per step; 'batch' alone, then the whole step outside the forward by kind of sampling")
    for result in results:
        print("  ".join(f"{name} {value:.0f}" for name, value in result.items()))


if __name__ == "__main__":
    main()
