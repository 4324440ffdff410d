"""A load of every kind on a core that is recorded: samples, beams, aborts, stops, failures, resets, preemptions."""

from __future__ import annotations

import random
from pathlib import Path

from octavo.core.block_manager import BlockManager
from octavo.core.config import SchedulerConfig
from octavo.core.engine_core import EngineCore
from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.replay.recorder import Recorder
from octavo.testing.checking_executor import CheckingExecutor

VOCAB_SIZE = 12
END_TOKEN = 11
KINDS = ("plain", "plain", "plain", "samples", "best", "beams", "scores")


def params_of(kind: str, chance: random.Random) -> SamplingParams:
    count = chance.randrange(1, 24)
    if kind == "drops":
        policies = ("streaming:4,12,4", "h2o:12,4,4", "snapkv:12,4,1")
        return SamplingParams(max_tokens=count, kv_policy=chance.choice(policies))
    if kind == "samples":
        return SamplingParams(max_tokens=count, n=3)
    if kind == "best":
        return SamplingParams(max_tokens=count, n=1, best_of=3)
    if kind == "beams":
        return SamplingParams(max_tokens=count, n=2, best_of=2, use_beam_search=True)
    if kind == "scores":
        return SamplingParams(max_tokens=count, prompt_logprobs=0)
    return SamplingParams(max_tokens=count, min_tokens=chance.randrange(0, count))


def recorded_run(
    path: Path,
    *,
    seed: int = 4,
    num_blocks: int = 30,
    num_requests: int = 80,
    windows: tuple[int | None, ...] = (None,),
) -> EngineCore:
    chance = random.Random(seed)
    groups = [KVGroupSpec(f"g{at}", (at,), 1, 16, "bf16", window=window) for at, window in enumerate(windows)]
    spec = KVSpec(tuple(groups), 4)
    blocks = BlockManager(spec, num_blocks * len(windows))
    executor = CheckingExecutor(4, vocab_size=VOCAB_SIZE, windows=windows, keep_plans=False)
    core = EngineCore(Scheduler(SchedulerConfig(6, 24, 96), blocks), executor)
    recorder = Recorder(path, core, b"a key of the test", clock=lambda: 0.0, about={"model": "none"})
    texts = [[chance.randrange(3) for _ in range(40)] for _ in range(3)]
    names: list[str] = []
    while num_requests or core.has_work:
        prompt = [*chance.choice(texts)[: chance.randrange(1, 40)], chance.randrange(3)]
        for _ in range(min(num_requests, chance.choice((0, 0, 0, 1, 1, 2)))):  # two of the same: the second waits
            num_requests -= 1
            name = f"id#{num_requests}" if chance.random() < 0.3 else f"request-{num_requests}"
            about = {"namespace": chance.choice(("", "", "tenant")), "priority": chance.randrange(2)}
            params = params_of(chance.choice(KINDS if any(windows) else (*KINDS, "drops")), chance)
            core.add(Request(name, prompt, params, seed=num_requests, eos_token_ids=(END_TOKEN, 10), **about))
            names.append(name)
        event = chance.random()
        if names and event < 0.03:
            core.abort(chance.choice(names))
        elif names and event < 0.06:
            core.finish(chance.choice(names), chance.randrange(3))
        elif event < 0.07:
            core.reset_prefix_cache()
        elif event < 0.08 and core.scheduler.running:
            executor.fail_next[chance.choice(core.scheduler.running).request_id] = "it fails"
        if core.has_work:
            core.step()
    recorder.close()
    assert recorder.error is None
    return core
