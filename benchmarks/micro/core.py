"""What the cache core and the scheduler cost, without any model.

    python benchmarks/micro/core.py [--json PATH]

A "life" of a request is: find and attach its prefix, grow to all tokens, commit, release. Times are medians, in
microseconds a block of 16 tokens unless said otherwise. The garbage collector runs as it does in an engine.
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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from octavo.core.block_key import BlockKeyChain
from octavo.core.block_manager import BlockManager
from octavo.core.config import SchedulerConfig
from octavo.core.engine_core import EngineCore
from octavo.core.kv_groups import LayerGeometry, build_groups
from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import SampledToken, StepPlan, StepResult

BLOCK_SIZE = 16
PROMPT_TOKENS = 1536
SPEC = KVSpec((KVGroupSpec("full", (0,), 1, 64, "bf16"),), BLOCK_SIZE)
PARAMS = SamplingParams(max_tokens=8)
TARGET_US, TARGET_KEYS_US = 1.2, 0.8

Figures = dict[str, float]
RNG = random.Random(0)


def tokens(count: int) -> list[int]:
    return [RNG.randrange(49152) for _ in range(count)]


def request_of(token_ids: list[int]) -> Request:
    return Request("r", token_ids, PARAMS, seed=0)


def life(blocks: BlockManager, request: Request) -> None:
    blocks.attach_prefix(request, blocks.find_prefix(request))
    blocks.grow(request, len(request.token_ids))
    request.num_computed_tokens = len(request.token_ids)
    blocks.commit(request)
    blocks.release(request)


def median_us(requests: list[Request], run: Callable[[Request], None]) -> float:
    """Microseconds a block of one request."""
    times = []
    for request in requests:
        start = time.perf_counter()
        run(request)
        times.append((time.perf_counter() - start) * 1e6 / (len(request.token_ids) / BLOCK_SIZE))
    return statistics.median(times)


def lives(num_blocks: int, count: int, num_tokens: int = PROMPT_TOKENS, keys: BlockKeyChain | None = None) -> float:
    """Requests with nothing in common."""
    blocks = BlockManager(SPEC, num_blocks, block_keys=keys)
    return median_us([request_of(tokens(num_tokens)) for _ in range(count)], lambda request: life(blocks, request))


def measure_lives() -> Figures:
    per_request = PROMPT_TOKENS // BLOCK_SIZE
    keys = BlockKeyChain(model_digest="digest", kv_format="bf16", block_size=BLOCK_SIZE)
    figures = {
        "cold": lives(500 * per_request, 500),
        "cold, pool full (evicts as much)": lives(20 * per_request, 500),
        "cold, with block keys": lives(500 * per_request, 500, keys=keys),
        "cold, pool full, with block keys": lives(20 * per_request, 500, keys=keys),
    }
    blocks = BlockManager(SPEC, 60 * per_request)
    prompts = [tokens(PROMPT_TOKENS) for _ in range(40)]
    for prompt in prompts:
        life(blocks, request_of(prompt))
    figures["hit (all but the last token)"] = median_us(
        [request_of(prompt) for prompt in prompts * 12], lambda request: life(blocks, request)
    )
    return figures


def measure_parts() -> Figures:
    """The four calls of a cold life in a full pool, and of a hit."""
    per_request = PROMPT_TOKENS // BLOCK_SIZE
    figures: dict[str, list[float]] = {}
    blocks = BlockManager(SPEC, 20 * per_request)
    for kind, prompts in (
        ("cold", [tokens(PROMPT_TOKENS) for _ in range(300)]),
        ("hit", [tokens(PROMPT_TOKENS)] * 300),
    ):
        for prompt in prompts:
            request = request_of(prompt)
            at = [time.perf_counter()]
            blocks.attach_prefix(request, blocks.find_prefix(request))
            at.append(time.perf_counter())
            blocks.grow(request, PROMPT_TOKENS)
            at.append(time.perf_counter())
            request.num_computed_tokens = PROMPT_TOKENS
            blocks.commit(request)
            at.append(time.perf_counter())
            blocks.release(request)
            at.append(time.perf_counter())
            for name, start, end in zip(("attach", "grow", "commit", "release"), at, at[1:], strict=False):
                figures.setdefault(f"{kind}: {name}", []).append((end - start) * 1e6 / per_request)
    return {name: statistics.median(times) for name, times in figures.items()}


def measure_prefix_length() -> Figures:
    """A life by its length, and what a request in decode pays for one more block behind a prefix."""
    figures = {
        f"cold, {num_tokens} tokens": lives(4 * 65536 // BLOCK_SIZE, 400_000 // num_tokens, num_tokens)
        for num_tokens in (256, 1536, 8192, 65536)
    }
    for num_tokens in (256, 1536, 8192, 65536):
        blocks = BlockManager(SPEC, 2 * 65536 // BLOCK_SIZE)
        request = request_of(tokens(num_tokens))
        blocks.attach_prefix(request, blocks.find_prefix(request))
        blocks.grow(request, num_tokens)
        request.num_computed_tokens = num_tokens
        blocks.commit(request)
        times = []
        for _ in range(400):
            request.token_ids.extend(tokens(BLOCK_SIZE))
            start = time.perf_counter()
            blocks.grow(request, len(request.token_ids))
            request.num_computed_tokens += BLOCK_SIZE
            blocks.commit(request)
            times.append((time.perf_counter() - start) * 1e6)
        figures[f"one more block behind {num_tokens} tokens"] = statistics.median(times)
    return figures


def measure_tree_size() -> Figures:
    """Cold lives in a full pool, so that the tree keeps its size."""
    figures = {}
    for num_blocks in (1_000, 10_000, 100_000, 400_000):
        blocks = BlockManager(SPEC, num_blocks)
        fill = -(-num_blocks * BLOCK_SIZE // PROMPT_TOKENS)
        for _ in range(fill):
            life(blocks, request_of(tokens(PROMPT_TOKENS)))
        prompts = [request_of(tokens(PROMPT_TOKENS)) for _ in range(200)]
        figures[f"tree of {num_blocks} blocks"] = median_us(prompts, lambda request, b=blocks: life(b, request))
    return figures


def measure_children() -> Figures:
    """Conversations behind one system prompt: each new one parts from an old one inside a block (a partial match)."""
    system = tokens(1536 - 64)
    figures = {}
    for count in (2, 100, 10_000, 100_000):
        blocks = BlockManager(SPEC, count + 400 * 6)
        talks = [tokens(BLOCK_SIZE) for _ in range(count)]
        for talk in talks:
            life(blocks, request_of([*system, *talk, 0]))
        requests = [request_of([*system, *RNG.choice(talks)[:8], *tokens(57)]) for _ in range(300)]
        copies = blocks.num_copies
        figures[f"{count} conversations"] = median_us(requests, lambda request, b=blocks: life(b, request))
        assert blocks.num_copies - copies == len(requests), "a partial match was missed"
        times = []
        for _ in range(min(count, 1000)):  # the oldest conversations leave, one after the other
            start = time.perf_counter()
            blocks.supply.evict(1)
            times.append((time.perf_counter() - start) * 1e6)
        figures[f"one of {count} conversations leaves"] = statistics.median(times)
    return figures


def chunked_life(blocks: BlockManager, request: Request) -> None:
    """As `life`, in steps of 512 tokens, as windows pass blocks between two of them."""
    blocks.attach_prefix(request, blocks.find_prefix(request))
    while request.num_computed_tokens < len(request.token_ids):
        end = min(len(request.token_ids), request.num_computed_tokens + 512)
        blocks.grow(request, end)
        request.num_computed_tokens = end
        blocks.commit(request)
    blocks.release(request)


def measure_windows() -> Figures:
    """Lives of 8,192 tokens in a full pool, per block of tokens: one group, and the six of Gemma 3 270M."""
    figures = {}
    for name, windows in (("1 full group", [None]), ("1 full group and 5 windows", [None] + [512] * 5)):
        layers = [LayerGeometry(1, 256, "bf16", window) for window in windows]
        groups = [replace(build_groups([layer])[0], layer_indices=(i,), name=str(i)) for i, layer in enumerate(layers)]
        spec = KVSpec(tuple(groups), BLOCK_SIZE)
        blocks = BlockManager(spec, 4 * spec.blocks_for_tokens(8192, 512))
        prompts = [request_of(tokens(8192)) for _ in range(60)]
        figures[f"cold in steps of 512, pool full, {name}"] = median_us(
            prompts, lambda request, b=blocks: chunked_life(b, request)
        )
        assert blocks.supply.num_evicted
        figures[f"hit, {name}"] = median_us(
            [request_of(prompts[-1].token_ids.tolist()) for _ in range(20)],
            lambda request, b=blocks: chunked_life(b, request),
        )
        figures[f"microseconds a step, 64 requests, 8192 tokens each, {name}"] = step_us(spec, 8192)
    return figures


class NullExecutor:
    """Samples token 1 and does nothing."""

    def execute(self, plan: StepPlan) -> StepResult:
        token = SampledToken(1)
        return StepResult({row.request_id: token for row in plan.rows if row.sample}, num_tokens=plan.num_tokens)


def measure_steps() -> Figures:
    """A whole step of EngineCore with 64 requests in decode."""
    figures = {}
    for context in (256, 1536, 8192):
        figures[f"microseconds a step, {context} tokens each"] = microseconds = step_us(SPEC, context)
        figures[f"steps/s, 64 requests, {context} tokens each"] = 1e6 / microseconds
    return figures


def step_us(spec: KVSpec, context: int) -> float:
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=4096, max_model_len=2 * 8192)
    blocks = BlockManager(spec, 64 * 2 * 8192 // BLOCK_SIZE * len(spec.groups))
    core = EngineCore(Scheduler(config, blocks), NullExecutor())
    for index in range(64):
        core.add(Request(f"r{index}", tokens(context), SamplingParams(max_tokens=1000), seed=0))
    while core.status().generation_tokens < 64 * 3 or core.status().waiting:
        core.step()
    times = []
    for _ in range(400):
        start = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def commit_id() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    sections = {
        "a life, microseconds a block": measure_lives(),
        "its parts": measure_parts(),
        "by the length of the prefix": measure_prefix_length(),
        "by the size of the tree": measure_tree_size(),
        "by the children of a node (92 of 96 blocks hit, one more in part)": measure_children(),
        "scheduler": measure_steps(),
        "KV groups (a block is 16 tokens in all groups)": measure_windows(),
    }
    for title, figures in sections.items():
        print(f"\n{title}")
        for name, value in figures.items():
            print(f"  {name:<44}{value:>10.2f}")
    cold = sections["a life, microseconds a block"]
    worst = max(value for name, value in cold.items() if "keys" not in name)
    added = max(cold["cold, with block keys"] - cold["cold"], 0.0)
    print(
        f"\nworst life {worst:.2f} us a block (at most {TARGET_US}); keys add {added:.2f} us (at most {TARGET_KEYS_US})"
    )
    if arguments.json is not None:
        machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        about = {**machine, "python": platform.python_version(), "commit": commit_id(), "command": "micro/core.py"}
        arguments.json.write_text(json.dumps({"about": about, "figures": sections}, indent=1) + "\n")


if __name__ == "__main__":
    main()
