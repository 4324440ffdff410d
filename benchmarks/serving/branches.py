"""What branches save: memory on real prompts, by sharing blocks, and time, by computing a prompt once.

    PYTHONPATH=src python benchmarks/serving/branches.py MODEL --data FOLDER [--out benchmarks/results/branches.json]

FOLDER holds `fewshot/` (GSM8K) and `chat/` (MT-bench). Memory: over all steps of all prompts, the blocks saved by the
blocks that would be held without sharing, as in the paper on PagedAttention (OPT-13B on Alpaca and ShareGPT; 2, 4 and 6
branches). Time: n = 8 of a 1,000-token prompt with 32 tokens each, against eight requests one after the other without
the prefix cache, and without any KV cache.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo import LLM, BeamSearchParams, SamplingParams, branch_seed
from octavo.core.sharing import BranchMemory

PAPER = {"parallel sampling": "6.1% to 30.5%", "beam search": "37.6% to 66.3%"}
WIDTHS = (2, 4, 6)
NUM_SHOTS = 5
PROMPT_TOKENS, NUM_BRANCHES, NUM_TOKENS = 1000, 8, 32
GOAL = 5.0


def read_lines(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return [json.loads(line) for line in text.splitlines()]


def read_prompts(data: Path, llm: LLM, count: int) -> dict[str, list[list[int]]]:
    """Token ids of prompts, by kind."""
    tokenizer, template = llm.model.tokenizer, llm.model.chat_template
    assert template is not None
    train = read_lines(data / "fewshot" / "gsm8k_train_first200.jsonl.gz")
    shots = "".join(f"Question: {one['question']}\nAnswer: {one['answer']}\n\n" for one in train[:NUM_SHOTS])
    asked = [one["question"] for one in train[100 : 100 + count]]
    questions = read_lines(data / "chat" / "mt_bench_question.jsonl")
    chosen = questions[:: len(questions) // count][:count]
    talks = [template.render([{"role": "user", "content": one["turns"][0]}], True) for one in chosen]
    return {
        f"few-shot (GSM8K, {NUM_SHOTS} examples)": [
            tokenizer.encode(f"{shots}Question: {question}\nAnswer:") for question in asked
        ],
        "question alone (GSM8K)": [tokenizer.encode(f"Question: {question}\nAnswer:") for question in asked],
        "chat (MT-bench, first turn)": [tokenizer.encode(talk, add_special_tokens=False) for talk in talks],
    }


class Meter:
    """Adds up what is told after each step."""

    def __init__(self) -> None:
        self.saved = 0
        self.held = 0
        self.peak_saved = 0

    def hear(self, memories: tuple[BranchMemory, ...]) -> None:
        saved = sum(memory.sharing.saved_blocks for memory in memories)
        self.saved += saved
        self.held += sum(memory.blocks for memory in memories)
        self.peak_saved = max(self.peak_saved, saved)

    def result(self) -> dict[str, float]:
        return {
            "saved_percent": round(100 * self.saved / max(1, self.saved + self.held), 1),
            "peak_saved_blocks": self.peak_saved,
        }


def memory_of(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
    results = []
    for width in WIDTHS:
        samples, beams = Meter(), Meter()
        for index, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=max_tokens, n=width, seed=index, temperature=1.0, top_p=0.95)
            llm.generate([prompt], params, on_step=samples.hear)
            llm.beam_search([prompt], BeamSearchParams(width, max_tokens), on_step=beams.hear)
        results.append({"branches": width, "parallel sampling": samples.result(), "beam search": beams.result()})
        print(json.dumps(results[-1]), flush=True)
    return results


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def time_of(model: str, rounds: int, text: str) -> dict[str, Any]:
    one = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=1, ignore_eos=True)
    settings: dict[str, dict[str, Any]] = {"no prefix cache": {"enable_prefix_caching": False}}
    settings["no KV cache"] = {"enable_kv_cache": False}
    found: dict[str, Any] = {"prompt_tokens": PROMPT_TOKENS, "n": NUM_BRANCHES, "tokens_each": NUM_TOKENS}
    with LLM(model, max_model_len=2048) as shared:
        prompt = (shared.model.tokenizer.encode(text) * 10)[:PROMPT_TOKENS]
        for name, options in settings.items():
            with LLM(model, max_model_len=2048, **options) as apart:
                times: list[tuple[float, float]] = []
                for _ in range(rounds if name == "no prefix cache" else 1):
                    shared.model.core.reset_prefix_cache()
                    together = seconds(lambda: shared.generate([prompt], replace(one, n=NUM_BRANCHES)))
                    separate = sum(
                        seconds(lambda: apart.generate([prompt], replace(one, seed=branch_seed(1, branch))))  # noqa: B023
                        for branch in range(NUM_BRANCHES)
                    )
                    times.append((together, separate))
            ratio = statistics.median(separate / together for together, separate in times)
            found[f"against {NUM_BRANCHES} requests, {name}"] = {
                "together_s": round(statistics.median(together for together, _ in times), 3),
                "one_after_the_other_s": round(statistics.median(separate for _, separate in times), 3),
                "times_as_fast": round(ratio, 2),
                "rounds": len(times),
                "goal": GOAL,
            }
            print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=6, help="prompts of each kind")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with LLM(arguments.model, max_model_len=2048) as llm:
        kinds = read_prompts(arguments.data, llm, arguments.prompts)
        memory = {
            kind: {
                "mean_prompt_tokens": round(statistics.mean(map(len, prompts))),
                "by_width": memory_of(llm, prompts, arguments.max_tokens),
            }
            for kind, prompts in kinds.items()
        }
    novel = read_lines(arguments.data / "fewshot" / "gsm8k_train_first200.jsonl.gz")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    result = {
        "commit": commit,
        "command": "benchmarks/serving/branches.py",
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "load_at_start": os.getloadavg()[0],
        "model": Path(arguments.model).name,
        "prompts_of_each_kind": arguments.prompts,
        "max_tokens": arguments.max_tokens,
        "memory": memory,
        "paper_saving": PAPER,
        "time": time_of(arguments.model, arguments.rounds, " ".join(one["question"] for one in novel[:40])),
    }
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
