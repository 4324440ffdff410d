"""A long mixed load with aborts on the real executor: one final answer each, blocks balance, memory stays flat."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from octavo import SchedulerOptions, load
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.executor.config import ExecutorConfig
from tests.models.tiny_models import make_tiny_model

MAX_MODEL_LEN = 160
NUM_BLOCKS = 24
MAX_OPEN = 48  # requests that clients have open at once


def resident_bytes() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def make_request(rng: random.Random, index: int, vocab_size: int, shared: list[list[int]]) -> Request:
    prefix = rng.choice(shared)[: rng.choice([0, 7, 32, 64])]
    prompt = prefix + [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 40))]
    params = SamplingParams(
        max_tokens=min(MAX_MODEL_LEN - len(prompt), max(1, int(rng.lognormvariate(2.4, 0.8)))),
        temperature=rng.choice([0.0, 0.9]),
        top_k=rng.choice([0, 20]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        ignore_eos=rng.random() < 0.5,
    )
    namespace = rng.choice(["", "one", "two"])
    return Request(
        f"r{index}", prompt, params, seed=index, eos_token_ids=(2,), namespace=namespace, priority=rng.randint(0, 1)
    )


@pytest.mark.parametrize(
    "num_requests",
    [
        pytest.param(1_500, id="1500"),
        pytest.param(20_000, id="20000", marks=[pytest.mark.large, pytest.mark.timeout(1500)]),
    ],
)
def test_mixed_load_with_aborts(tmp_path: Path, num_requests: int) -> None:
    directory = make_tiny_model(tmp_path, "llama2")
    block_bytes = 16 * 3 * 2 * 2 * 16 * 4  # tokens, layers, K and V, KV heads, head_dim, f32
    model = load(
        str(directory),
        scheduler=SchedulerOptions(max_num_seqs=24, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN),
        executor=ExecutorConfig(kv_cache_memory=NUM_BLOCKS * block_bytes, threads=1),
    )
    core, rng = model.core, random.Random(num_requests)
    shared = [[rng.randrange(3, model.vocab_size) for _ in range(64)] for _ in range(6)]
    answers: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    open_ids: dict[str, None] = {}
    added, steps, after_warm_up = 0, 0, 0
    while added < num_requests or open_ids:
        while added < num_requests and len(open_ids) < MAX_OPEN:
            request = make_request(rng, added, model.vocab_size, shared)
            core.add(request)
            open_ids[request.request_id] = None
            added += 1
            if rng.random() < 0.2:  # a fifth is given up, in whatever state it is at some later step
                victim = rng.choice(list(open_ids))
                assert core.abort(victim) or victim in open_ids
        for output in core.step():
            if output.finish_reason is not None:
                answers[output.request_id] += 1
                reasons[output.finish_reason] += 1
                open_ids.pop(output.request_id)
        status = core.status()
        assert status.free_blocks + status.cached_blocks + status.used_blocks == status.num_blocks == NUM_BLOCKS
        steps += 1
        if not after_warm_up and added >= num_requests // 4:
            after_warm_up = resident_bytes()
    assert len(answers) == num_requests
    assert set(answers.values()) == {1}
    assert reasons["abort"] > 0.1 * num_requests
    assert reasons["error"] == 0
    status = core.status()
    assert status.used_blocks == status.running == status.waiting == 0
    assert status.processed_tokens == status.computed_tokens + status.recomputed_tokens + status.failed_tokens
    assert status.hit_tokens > 0
    assert status.preemptions > 0
    assert status.evicted_blocks > 0
    assert resident_bytes() - after_warm_up < 16 * 2**20, "memory grows with the number of requests served"
