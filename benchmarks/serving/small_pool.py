"""What smaller KV formats give where memory is short: the same bytes of cache, 64 requests, each format in turn.

    PYTHONPATH=src python benchmarks/serving/small_pool.py MODEL [--pool 96MiB] [--rounds 3] [--out PATH]

Requests have prompts of random ids of their own, so that nothing is shared, and answers of a fixed length. All of them
are there from the start; how many run at once is what the pool decides. Each round runs every format, in another order.
The clock of the wall tells what users see, that of the processor what a busy neighbour hides.
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
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from octavo import LLM, SamplingParams
from octavo.cli.units import parse_bytes

NUM_REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 64, 128, 128


@dataclass(slots=True)
class Measured:
    """One format in this pool."""

    kv_format: str
    bytes_per_token: int
    num_blocks: int
    held_tokens: int  # that the pool has room for, of one text
    peak_running: int = 0  # requests at once, in any round
    preemptions: int = 0  # in all rounds
    wall_s: list[float] = field(default_factory=list)  # of each round
    processor_s: list[float] = field(default_factory=list)

    def run(self, llm: LLM, prompts: list[list[int]]) -> None:
        core = llm.model.core
        before = core.status().preemptions
        core.reset_prefix_cache()

        def look(_: object) -> None:
            self.peak_running = max(self.peak_running, core.status().running)

        params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        wall, processor = time.perf_counter(), time.process_time()
        found = llm.generate(prompts, params, on_step=look)
        self.wall_s.append(time.perf_counter() - wall)
        self.processor_s.append(time.process_time() - processor)
        self.preemptions += core.status().preemptions - before
        assert all(len(one.token_ids) == ANSWER_TOKENS for one in found)

    def summary(self) -> dict[str, object]:
        answered = NUM_REQUESTS * ANSWER_TOKENS
        return {
            **asdict(self),
            "answer_tokens_per_s": answered / statistics.median(self.wall_s),
            "answer_tokens_per_processor_s": answered / statistics.median(self.processor_s),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--pool", type=parse_bytes, default=96 << 20)
    parser.add_argument("--formats", default="bf16,int8,int4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    llms, measured = {}, {}
    for name in asked.formats.split(","):
        llm = llms[name] = LLM(asked.model, kv_cache_dtype=name, kv_cache_memory=asked.pool, max_model_len=1024)
        plan = llm.model.plan
        measured[name] = Measured(name, plan.spec.bytes_per_token, plan.num_blocks, plan.kv_tokens)
    rng = random.Random(0)
    vocab_size = next(iter(llms.values())).model.vocab_size
    for turn in range(asked.rounds):
        prompts = [[rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_REQUESTS)]
        names = list(llms)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            measured[name].run(llms[name], prompts)
            print(f"round {turn + 1}: {name} {measured[name].wall_s[-1]:.1f} s, load {os.getloadavg()[0]:.1f}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    result = {
        "about": {
            "command": f"small_pool.py {Path(asked.model).name} --pool {asked.pool} --rounds {asked.rounds}",
            "requests": NUM_REQUESTS,
            "prompt_tokens": PROMPT_TOKENS,
            "answer_tokens": ANSWER_TOKENS,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "instruction_set": next(iter(llms.values())).model.instruction_set,
            "load": os.getloadavg(),
            "python": platform.python_version(),
            "numpy": version("numpy"),
            "commit": commit,
        },
        "pool_bytes": asked.pool,
        "formats": [one.summary() for one in measured.values()],
    }
    for one in measured.values():
        about = one.summary()
        print(
            f"{one.kv_format}: {one.held_tokens} tokens held, {one.peak_running} requests at once, {one.preemptions} "
            f"preemptions, {about['answer_tokens_per_s']:.1f} tokens/s ({about['answer_tokens_per_processor_s']:.1f} "
            "per second of processor time)"
        )
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
