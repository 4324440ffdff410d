"""A soak in miniature: many requests, a fifth of them aborted, everything balances, nothing stays behind (F11, F24)."""

from __future__ import annotations

import gc
import random

import pytest

from octavo.core.block_manager import BlockManager
from octavo.core.config import SchedulerConfig
from octavo.core.engine_core import EngineCore
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.testing.checking_executor import CheckingExecutor
from tests.core.group_windows import kv_spec


def soak(num_requests: int) -> None:
    rng = random.Random(0)
    blocks = BlockManager(kv_spec(8), 60)
    executor = CheckingExecutor(8, vocab_size=4, keep_plans=False)
    core = EngineCore(Scheduler(SchedulerConfig(8, 64, 400), blocks), executor)
    prompts = [[rng.randrange(4) for _ in range(100)] for _ in range(10)]
    open_ids: list[str] = []
    finals: dict[str, str] = {}
    num_added = 0
    while num_added < num_requests or core.has_work:
        while num_added < num_requests and len(open_ids) < 20:
            prompt = rng.choice(prompts)[: rng.randrange(1, 100)] + [
                rng.randrange(4) for _ in range(rng.randrange(1, 30))
            ]
            params = SamplingParams(max_tokens=rng.randrange(1, 60))
            namespace = rng.choice(["", "", "", f"tenant {num_added}"])
            core.add(Request(f"soak {num_added}", prompt, params, seed=num_added, namespace=namespace))
            open_ids.append(f"soak {num_added}")
            num_added += 1
        if open_ids and rng.random() < 0.06:
            core.abort(rng.choice(open_ids))
        for output in core.step():
            if output.finish_reason is not None:
                assert output.request_id not in finals
                finals[output.request_id] = output.finish_reason
                open_ids.remove(output.request_id)
        status = core.status()
        assert status.free_blocks + status.cached_blocks + status.used_blocks == status.num_blocks
        assert status.computed_tokens + status.recomputed_tokens == status.processed_tokens
    assert len(finals) == num_requests
    assert num_requests * 0.1 < list(finals.values()).count("abort") < num_requests * 0.4
    assert core.status().used_blocks == 0
    assert core.status().hit_tokens > 0
    assert core.status().evicted_blocks > 0
    assert core.status().preemptions > 0
    core.reset_prefix_cache()
    assert blocks.tree.num_namespaces == 0
    del output
    gc.collect()
    kept = [thing for thing in gc.get_objects() if type(thing) is Request and thing.request_id.startswith("soak")]
    assert not kept, f"{len(kept)} requests stay in memory after their end"


def test_a_small_soak() -> None:
    soak(600)


@pytest.mark.large
def test_a_soak_of_20000_requests() -> None:
    soak(20_000)
