"""Whether SnapKV and H2O keep what kvpress keeps: the same model, prompt and budget in float32, index by index.

python benchmarks/quality/kvpress_same.py MODEL --text FILE --out benchmarks/results/kvpress_same.json

MODEL is a directory that both octavo and transformers load. Wants kvpress beside octavo (it pins an older transformers:
a virtual environment of its own). SnapKV is kvpress's SnapKVPress. For H2O kvpress has ObservedAttentionPress, which
averages the attention that a key got over the queries since it came, where H2O sums it: the scores are compared as its
averages, and the indices with those that H2O's rule makes of its scores.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from about import commit, processor
from kvpress import ObservedAttentionPress, SnapKVPress

from octavo import LLM, SamplingParams
from octavo.core.selection import Choice
from octavo.executor.selection import choose, scores_of
from octavo.kernels.ops import MASS_UNITS


def octavo_choice(model: str, policy: str, token_ids: list[int]) -> tuple[Choice, np.ndarray]:
    """What octavo was asked to choose at its first drop, and the mass [layers, KV heads, slots] that it did it by."""
    seen: list[tuple[Choice, np.ndarray]] = []
    options: dict[str, Any] = {"weights_dtype": "f32", "kv_cache_dtype": "f32", "kv_cache_memory": 256 << 20}
    with LLM(model, kv_policy=policy, max_model_len=len(token_ids) + 4, **options) as llm:
        selector = llm.model.core._executor._selector  # type: ignore[attr-defined]
        weigh = selector.weighed

        def spy(row: Any, rows: Any) -> Any:
            if row.weighing.choice is not None:
                seen.append((row.weighing.choice, np.stack(rows.mass)))
            return weigh(row, rows)

        selector.weighed = spy
        llm.generate([token_ids], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    return seen[0]


def press_scores(model: Any, press: Any, token_ids: list[int]) -> np.ndarray:
    """[layers, KV heads, tokens], as the press has them when it compresses."""
    seen: dict[int, np.ndarray] = {}
    score = press.score

    def spy(module: Any, *args: Any, **options: Any) -> Any:
        found = score(module, *args, **options)
        seen[module.layer_idx] = found[0].double().numpy().copy()
        return found

    press.score = spy
    with torch.no_grad(), press(model):
        model(torch.tensor([token_ids]), output_attentions=True, logits_to_keep=1)
    return np.stack([seen[layer] for layer in sorted(seen)])


def compare(name: str, found: np.ndarray, expected: np.ndarray, kept: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    """Scores [layers, KV heads, tokens that are not recent], and which tokens are kept."""
    error = np.abs(found / expected - 1)
    differing = int((kept & ~theirs).sum())
    return {
        "compared_with": name,
        "heads": int(kept.shape[0] * kept.shape[1]),
        "heads_with_the_same_indices": int((kept == theirs).all(axis=2).sum()),
        "kept_indices": int(kept.sum()),
        "other_indices": differing,
        "largest_relative_error_of_a_score": float(f"{error.max():.3g}"),
        "mean_relative_error_of_a_score": float(f"{error.mean():.3g}"),
    }


def snap_kv(path: str, model: Any, token_ids: list[int], budget: int) -> dict[str, Any]:
    choice, mass = octavo_choice(path, f"snapkv:{budget},64,5", token_ids)
    count, group = len(token_ids), model.config.num_attention_heads // model.config.num_key_value_heads
    press = SnapKVPress(compression_ratio=1 - (budget + 0.5) / count, window_size=64, kernel_size=5)
    scores = press_scores(model, press, token_ids)
    theirs = np.zeros(scores.shape, bool)
    np.put_along_axis(theirs, torch.tensor(scores).topk(budget, dim=-1).indices.numpy(), True, axis=2)
    found = scores_of(mass, choice) / (MASS_UNITS * 64 * 5 * group)
    return compare("SnapKVPress", found, scores[..., :-64], choose(mass, choice), theirs)


def heavy_hitters(path: str, model: Any, token_ids: list[int], budget: int) -> dict[str, Any]:
    count, recent = len(token_ids), budget // 2
    choice, mass = octavo_choice(path, f"h2o:{budget},{recent},{count - budget}", token_ids)
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    scores = press_scores(model, ObservedAttentionPress(compression_ratio=0.5), token_ids)
    queries = np.arange(count, 0, -1)  # that see each key
    theirs = np.zeros(scores.shape, bool)
    best = torch.tensor((scores * queries)[..., :-recent]).topk(budget - recent, dim=-1).indices
    np.put_along_axis(theirs, best.numpy(), True, axis=2)
    theirs[..., -recent:] = True
    found = (mass / (MASS_UNITS * group * queries))[..., :-recent]
    return compare("ObservedAttentionPress", found, scores[..., :-recent], choose(mass, choice), theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    text = gzip.decompress(given.text.read_bytes()).decode() if given.text.suffix == ".gz" else given.text.read_text()
    token_ids = transformers.AutoTokenizer.from_pretrained(given.model)(text[: 8 * given.tokens])["input_ids"]
    token_ids = token_ids[: given.tokens]
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(given.model, dtype=torch.float32, attn_implementation="eager").eval()
    rows = {}
    for name, method in (("snapkv", snap_kv), ("h2o", heavy_hitters)):
        rows[name] = method(str(given.model), model, token_ids, given.budget)
        print(name, json.dumps(rows[name]), flush=True)
    about = {
        "model": given.model.name,
        "text": given.text.name,
        "prompt_tokens": len(token_ids),
        "budget_tokens": given.budget,
        "machine": processor(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("kvpress", "transformers", "torch", "numpy")},
        "commit": commit(),
        "command": f"python {Path(sys.argv[0]).name} {given.model.name} --text {given.text.name} "
        f"--tokens {given.tokens} --budget {given.budget}",
    }
    given.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
