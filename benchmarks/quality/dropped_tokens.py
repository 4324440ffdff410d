"""What keeping fewer tokens costs: prose, and questions about something far back, under each `--kv-policy`.

python benchmarks/quality/dropped_tokens.py MODEL --texts FOLDER --out benchmarks/results/dropped_tokens.json

Prose: nats per token of the second half of a long text, each token predicted from what its policy has kept of the text
before it (SnapKV chooses once, where that half begins). Questions: LongEval's lines and key-value retrieval, cut to the
model's context; how often the greedy answer holds what was asked for, and the nats of the right answer when it is
given, which move even where a small model answers nothing right.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from about import commit, processor
from retrieval_texts import Question, key_values, long_eval

from octavo import LLM, SamplingParams
from octavo.core.keep_policy import Drops, KeepPolicy, parse_policy
from octavo.core.request import Request

BUDGETS = (512, 256, 128)  # tokens that are kept at most; SnapKV: of the prompt
PROSE_BUDGETS = (1024, 512, 256)
CONTEXT = 4608


def policies(budget: int) -> tuple[str, ...]:
    """Each keeps at most so many tokens."""
    kept = budget - 64
    return (f"streaming:16,{kept - 16},64", f"h2o:{kept},{kept // 2},64", f"snapkv:{budget},32,5")


def every_policy(budgets: Sequence[int]) -> list[tuple[str, int | None]]:
    return [("all", None), *((policy, budget) for budget in budgets for policy in policies(budget))]


@dataclass(frozen=True, slots=True)
class ChoosingAt:
    """A policy for which a prompt ends before its text does: what follows is an answer that is given."""

    inner: KeepPolicy
    num_prompt_tokens: int

    def loss(self, block_size: int) -> str:
        return self.inner.loss(block_size)

    def most_slots(self, block_size: int) -> int | None:
        return self.inner.most_slots(block_size)

    def plan(self, block_size: int, num_prompt_tokens: int = 0, most_tokens: int | None = None) -> Drops | None:
        assert num_prompt_tokens >= self.num_prompt_tokens
        return self.inner.plan(block_size, self.num_prompt_tokens, most_tokens)


class Model:
    """Runs one text after the other, nothing being cached between them."""

    def __init__(self, path: str, kv_bytes: int) -> None:
        self.llm = LLM(path, max_model_len=CONTEXT, kv_cache_memory=kv_bytes, enable_prefix_caching=False)
        self._number = 0

    def nats(self, prompt: Sequence[int], answer: Sequence[int], policy: str) -> float:
        """For each token of `answer`, when it follows `prompt`: the mean."""
        keep = parse_policy(policy)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        keep = None if keep is None else ChoosingAt(keep, len(prompt))
        outputs = self._run([*prompt, *answer], params, keep, len(prompt) - 1)
        scores = [-(score.logprob or 0.0) for output in outputs for score in output.prompt_scores]
        assert len(scores) == len(answer)
        return sum(scores) / len(scores)

    def answer(self, prompt: Sequence[int], num_tokens: int, policy: str) -> str:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        outputs = self._run(prompt, params, parse_policy(policy))
        return self.llm.model.tokenizer.decode([output.token.token_id for output in outputs if output.token])

    def _run(
        self, token_ids: Sequence[int], params: SamplingParams, keep: KeepPolicy | None, num_unscored: int = 0
    ) -> list[Any]:
        core, outputs = self.llm.model.core, list[Any]()
        self._number += 1
        request = Request(f"r{self._number}", token_ids, params, seed=0, keep=keep)
        request.num_scored_tokens = num_unscored  # these scores nobody wants
        core.add(request)
        while core.has_work:
            outputs += core.step()
        assert outputs[-1].error is None, outputs[-1].error
        return outputs


def kept_bytes(model: Model, slots: int) -> int:
    spec = model.llm.model.plan.spec
    return spec.pool_bytes(spec.blocks_for_tokens(slots))


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def prose(model: Model, text: str, num_tokens: int, policy: str, budget: int | None) -> dict[str, Any]:
    token_ids = model.llm.model.tokenizer.encode(text)[:num_tokens]
    half = num_tokens // 2
    nats = model.nats(token_ids[:half], token_ids[half:], policy)
    slots = half + budget if policy.startswith("snapkv") and budget else budget or num_tokens
    return {
        "kv_policy": policy,
        "most_kept_tokens": slots,
        "kv_bytes": kept_bytes(model, slots),
        "nats_per_token": round(nats, 4),
        "perplexity": round(math.exp(nats), 2),
    }


def questions(model: Model, asked: Sequence[Question], policy: str, budget: int | None) -> dict[str, Any]:
    template, tokenizer = model.llm.model.chat_template, model.llm.model.tokenizer
    assert template is not None
    right, nats, lengths = 0, [], []
    for one in asked:
        said = template.render([{"role": "user", "content": one.text}], add_generation_prompt=True) + one.before
        prompt = tokenizer.encode(said, add_special_tokens=False)
        answer = tokenizer.encode(one.answer, add_special_tokens=False)
        lengths.append(len(prompt))
        right += one.answer in model.answer(prompt, len(answer) + 4, policy)
        nats.append(model.nats(prompt, answer, policy))
    return {
        "kv_policy": policy,
        "kept_tokens": budget or round(mean(lengths)),
        "prompt_tokens": round(mean(lengths)),
        "questions": len(asked),
        "right_answers": right,
        "nats_per_answer_token": round(mean(nats), 4),
    }


def draw(rows: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "octavo"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.4))
    panels = (
        ("prose", "nats_per_token", "nats per token of the second half", "Pride and Prejudice"),
        ("long_eval", "nats_per_answer_token", "nats per token of the answer", "LongEval lines"),
        ("key_values", "nats_per_answer_token", "nats per token of the answer", "key-value retrieval"),
    )
    for axis, (task, figure_name, label, title) in zip(axes, panels, strict=True):
        budgets = PROSE_BUDGETS if task == "prose" else BUDGETS
        for name, mark in (("streaming", "o"), ("h2o", "s"), ("snapkv", "^")):
            found = [row[figure_name] for row in rows[task] if row["kv_policy"].startswith(name)]
            axis.plot(budgets, found, marker=mark, label=name)
        whole = next(row[figure_name] for row in rows[task] if row["kv_policy"] == "all")
        axis.axhline(whole, color="gray", linestyle=":", label="all")
        axis.set_xscale("log", base=2)
        axis.set_xticks(budgets, [str(budget) for budget in budgets])
        axis.set_xlabel("kept tokens")
        axis.set_ylabel(label)
        axis.set_title(title, fontsize=10)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=Path, required=True, help="folder with the three texts")
    parser.add_argument("--tokens", type=int, default=4096, help="of prose")
    parser.add_argument("--questions", type=int, default=20, help="of each kind")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    model = Model(str(given.model), 256 << 20)
    text = gzip.decompress((given.texts / "book_pride_and_prejudice.txt.gz").read_bytes()).decode()
    asked = {
        "long_eval": long_eval(given.texts / "longeval_200_lines.jsonl.gz", given.questions, 60),
        "key_values": key_values(given.texts / "kv_retrieval_75_keys_first150.jsonl.gz", given.questions, 16),
    }
    rows: dict[str, list[dict[str, Any]]] = {"prose": []}
    for policy, budget in every_policy(PROSE_BUDGETS):
        rows["prose"].append(prose(model, text, given.tokens, policy, budget))
        print("prose", json.dumps(rows["prose"][-1]), flush=True)
    for task, ones in asked.items():
        rows[task] = []
        for policy, budget in every_policy(BUDGETS):
            rows[task].append(questions(model, ones, policy, budget))
            print(task, json.dumps(rows[task][-1]), flush=True)
    about = {
        "model": given.model.name,
        "kv_cache_dtype": model.llm.model.kv_cache_dtype,
        "predicted_tokens": given.tokens - given.tokens // 2,
        "machine": processor(),
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), "numpy": version("numpy")},
        "commit": commit(),
        "command": f"python {Path(sys.argv[0]).name} {given.model.name} --texts FOLDER --tokens {given.tokens} "
        f"--questions {given.questions}",
    }
    given.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    draw(rows, given.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
