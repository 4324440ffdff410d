"""Resident memory under load stays within the plan (F18) and flat (F24): read from a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.tiny_models import make_tiny_model

MIB = 1 << 20

# Loads a model, fills the pool with requests several times over, and prints the resident bytes at each stage.
SCRIPT = """
import json, random, sys
from octavo import LLM, SamplingParams

def resident():
    wanted = ("RssAnon:", "RssShmem:")  # what the process itself holds; mapped files can be dropped at any time
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(wanted))

import octavo.llm  # all code is loaded before the first reading
before = resident()
path, budget, rounds, num_requests, length = sys.argv[1], *map(int, sys.argv[2:])
llm = LLM(path, kv_cache_memory=budget, threads=2)
loaded = resident()
rng = random.Random(0)
stages, peak = [], 0
for _ in range(rounds):
    prompts = [[rng.randrange(3, 300) for _ in range(length)] for _ in range(num_requests)]
    llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0.7, top_p=0.9, ignore_eos=True))
    stages.append(resident())
status = llm.model.core.status()
print(json.dumps({
    "before": before, "loaded": loaded, "stages": stages, "weights": llm.model.weights_bytes,
    "kv": llm.model.plan.kv_bytes, "held_blocks": status.num_blocks - status.free_blocks,
    "num_blocks": status.num_blocks, "evicted": status.evicted_blocks, "preemptions": status.preemptions,
}))
"""


def measure(path: Path, budget: int, rounds: int, num_requests: int, length: int) -> dict[str, int | list[int]]:
    arguments = [str(path), *map(str, (budget, rounds, num_requests, length))]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True)
    measured: dict[str, int | list[int]] = json.loads(done.stdout)
    return measured


def test_under_load_the_process_holds_the_plan_and_no_more(smollm2_path: Path) -> None:
    """64 MiB of KV under three times as many tokens as it holds: resident is weights + KV + a bounded rest."""
    found = measure(smollm2_path, 64 * MIB, 2, 64, 100)
    assert found["evicted"] > 0, "the load is larger than the pool"
    assert found["held_blocks"] > found["num_blocks"] * 0.8
    grown = max(found["stages"]) - found["before"]
    planned = found["weights"] + found["kv"]
    # Not planned yet: tokenizer, activations of 512 rows, logits of 64 rows, the libraries' own arenas.
    assert planned * 0.9 < grown < planned + 96 * MIB, f"{grown / MIB:.0f} MiB for a plan of {planned / MIB:.0f} MiB"


def test_a_pool_that_is_not_used_costs_nothing(tmp_path: Path) -> None:
    found = measure(make_tiny_model(tmp_path), 1024 * MIB, 1, 8, 50)
    assert found["kv"] > 1000 * MIB
    assert found["stages"][-1] - found["before"] < 100 * MIB


def test_many_requests_leave_nothing_behind(tmp_path: Path) -> None:
    """2,000 requests through a pool of 1 MiB: after the first rounds nothing is added."""
    found = measure(make_tiny_model(tmp_path), 1 * MIB, 10, 200, 40)
    assert found["evicted"] > 1000
    settled = found["stages"][3:]
    assert max(settled) - settled[0] < 4 * MIB, [stage // 1024 for stage in found["stages"]]


@pytest.mark.large
def test_ever_more_requests_leave_nothing_behind(tmp_path: Path) -> None:
    found = measure(make_tiny_model(tmp_path), 1 * MIB, 60, 200, 40)
    settled = found["stages"][5:]
    assert max(settled) - settled[0] < 4 * MIB, [stage // 1024 for stage in found["stages"]]
