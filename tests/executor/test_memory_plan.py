"""The plan of a whole process against its buffers and against the memory that it really took."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.core.config import SchedulerConfig
from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.executor.memory import peak_resident_bytes, resident_bytes
from octavo.executor.memory_plan import (
    MemoryAccount,
    MemoryPlan,
    activation_rows,
    counting_bytes,
    counting_scratch_bytes,
    loading_bytes,
    working_bytes,
)
from tests.models.tiny_gguf import make_tiny_gguf
from tests.models.tiny_models import make_tiny_model

MIB = 1 << 20
PLAN = MemoryPlan(base_bytes=10, file_bytes=20, weights_bytes=300, kv_bytes=400, working_bytes=50, loading_bytes=60)

# Loads a model, fills its pool several times over, and prints what was planned and the most that was resident.
SCRIPT = """
import json, random, sys
from octavo import LLM, SamplingParams
path, budget, num_requests = sys.argv[1], *map(int, sys.argv[2:])
llm = LLM(path, kv_cache_memory=budget, threads=2)
rng = random.Random(0)
for _ in range(2):
    prompts = [[rng.randrange(3, 300) for _ in range(100)] for _ in range(num_requests)]
    llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0.7, top_p=0.9, ignore_eos=True))
scheduler = llm.model.core.scheduler
longest = min(scheduler.config.max_model_len, scheduler.blocks.pool.num_blocks * scheduler.blocks.block_size) - 8
# alone, in steps as large as there are
llm.generate([[rng.randrange(3, 300) for _ in range(longest)]], SamplingParams(max_tokens=4, ignore_eos=True))
from octavo.executor.memory import peak_resident_bytes
print(json.dumps({**llm.model.memory.as_object(), "peak": peak_resident_bytes()}))
"""


def run(path: Path, budget: int, num_requests: int) -> dict[str, int]:
    arguments = [sys.executable, "-c", SCRIPT, str(path), str(budget), str(num_requests)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_the_real_model_stays_under_its_plan(smollm2_path: Path) -> None:
    found = run(smollm2_path, 64 * MIB, 64)
    assert found["kv_allocated_bytes"] == found["kv_bytes"]
    assert found["weights_held_bytes"] == found["weights_bytes"], "no matrix of this model needs padding"
    assert found["peak"] <= found["peak_bytes"]
    assert found["peak"] > found["peak_bytes"] * 0.6, "the plan is not an idle bound"


@pytest.mark.parametrize("budget", [1 * MIB, 33 * MIB + 1])
def test_tiny_models_stay_under_theirs(budget: int, tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "m.gguf", "llama2", "Q8_0")
    for path in (make_tiny_model(tmp_path / "d", "qwen3"), tmp_path / "m.gguf"):
        found = run(path, budget, 20)
        assert found["kv_allocated_bytes"] == found["kv_bytes"]
        assert found["peak"] <= found["peak_bytes"]


def test_loading_is_over_before_the_cache_is_used() -> None:
    assert PLAN.peak_bytes == 10 + 20 + 300 + 450
    assert replace(PLAN, loading_bytes=1000).peak_bytes == 10 + 20 + 300 + 1000


def test_one_byte_of_difference_is_told() -> None:
    assert MemoryAccount(PLAN, 400, 300).differences() == ()
    for allocated in (399, 401):
        (found,) = MemoryAccount(PLAN, allocated, 300).differences()
        assert str(allocated) in found
        assert "400" in found


def test_the_end_says_whether_the_plan_held() -> None:
    account = MemoryAccount(PLAN, 400, 300)
    assert "under" in account.words(PLAN.peak_bytes)
    assert "ABOVE" in account.words(PLAN.peak_bytes + 1)


def test_bounds_by_shapes() -> None:
    shapes = [(1000, 8), (8,), (16, 8), (8, 16), (16, 8), (8, 16)]
    small, wide = (working_bytes(shapes, 2, rows, 4) for rows in (10, 20))
    assert wide - small == 10 * 24 * 4
    rows = {alone: activation_rows(SchedulerConfig(4, 10, max_num_prefill_tokens=alone)) for alone in (None, 20, 21)}
    assert rows == {None: 20, 20: 20, 21: 21}
    assert working_bytes(shapes, 2, 10, 5) - small == 1000 * 4 * 4
    assert loading_bytes(shapes) == 4 * (8000 + 8 + 4 * 128)
    assert loading_bytes([]) == 0


def test_reading_the_process(tmp_path: Path) -> None:
    status = tmp_path / "proc" / "self" / "status"
    status.parent.mkdir(parents=True)
    status.write_text("Name:\tx\nVmHWM:\t   2000 kB\nVmRSS:\t   1000 kB\n")
    assert peak_resident_bytes(tmp_path) == 2000 * 1024
    assert resident_bytes(tmp_path) == 1000 * 1024
    assert resident_bytes(tmp_path / "absent") > 10 * MIB, "from the system where there is no /proc"
    assert resident_bytes() <= peak_resident_bytes()


@pytest.mark.parametrize(
    ("policy", "num_slots", "num_sequences"),
    [
        ("all", 0, 0),
        ("streaming", 0, 0),
        ("h2o:100,50,20", 120, 4),
        ("h2o:3000,50,20", 2048, 4),
        ("snapkv:100,50", 2048, 2),
        ("snapkv:4000", 0, 0),
    ],
)
def test_counting_attention_is_planned(policy: str, num_slots: int, num_sequences: int) -> None:
    """What texts hold, and as much twice while a step counts, with one on its way back."""
    spec = KVSpec((KVGroupSpec("full", (0, 1, 2), 2, 16, "bf16"), KVGroupSpec("other", (3, 4, 5), 2, 16, "bf16")), 16)
    found = counting_bytes(spec, SchedulerConfig(4, 64, 2048, kv_policy=policy), num_heads=6, num_threads=3)
    scratch = counting_scratch_bytes(num_slots, 3, 16, 3) if num_slots else 0
    assert found == 3 * 8 * 6 * 2 * num_slots * (num_sequences + 1 if num_sequences else 0) + scratch
