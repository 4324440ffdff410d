"""The least time that the workloads could take on this machine, from probes made now; prints one JSON object.

    python roofline.py MODEL.gguf [--threads N]

A model of an ideal engine with octavo's weights and cache: nothing is computed twice (prefixes that requests share are
computed once), multiply-adds of the weights' dtype for the linear layers and of bf16 for attention at the probed peaks,
weights and K and V read once a step at the probed bandwidth. Scales of the weights, norms, exponentials, sampling, HTTP
and the client cost nothing in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from workloads import build

from octavo.core.kv_spec import KVSpec
from octavo.llm import ExecutorConfig, load
from octavo.models.hub import resolve
from octavo.models.loader import open_model

sys.path.insert(0, str(Path(__file__).parents[1] / "micro"))
from probe import Probe, Prober


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose rows read as many keys."""

    window: int | None  # keys that a row reads at most
    attention_macs: int  # for each key that a token reads
    kv_bytes: int  # of one token


@dataclass(frozen=True, slots=True)
class Model:
    """What a token costs."""

    layer_macs: int  # multiply-adds of the linear layers, without the head
    head_macs: int
    weights_dtype: str
    weights_bytes: int
    groups: tuple[Group, ...]


def keys_read(have: int, new: int, window: int | None) -> int:
    """By rows at positions have to have + new - 1, each of which reads itself and what is before it."""
    everything = new * (2 * have + new + 1) // 2
    if window is None:
        return everything
    over = max(have + new - window, 0)  # rows that see more than the window count a key too many for each one beyond
    before = max(have - window, 0)
    return everything - over * (over + 1) // 2 + before * (before + 1) // 2


def seconds(waves: list[list[tuple[list[int], int]]], model: Model, peak: Probe) -> float:
    """waves of (prompt token ids, max_tokens); each wave begins when the one before has ended."""
    linear_rate = {"int8": peak.int8_gmac_s, "bf16": peak.bf16_gmac_s, "f32": peak.f32_gmac_s}[
        model.weights_dtype
    ] * 1e9
    read_rate = peak.read_gb_s * 1e9
    known: set[tuple[int, ...]] = set()  # prefixes whose K and V exist, one for each 16 tokens
    total = 0.0
    for wave in waves:
        for ids, _ in wave:
            blocks = [tuple(ids[: end + 16]) for end in range(0, len(ids) - 1, 16)]
            have = 16 * next((i for i, block in enumerate(blocks) if block not in known), len(blocks))
            known.update(blocks)
            have = min(have, len(ids) - 1)
            new = len(ids) - have
            total += (new * model.layer_macs + model.head_macs) / linear_rate
            for group in model.groups:
                total += keys_read(have, new, group.window) * group.attention_macs / (peak.bf16_gmac_s * 1e9)
        for step in range(1, max(limit for _, limit in wave)):
            rows = [len(ids) + step for ids, limit in wave if limit > step]
            macs = len(rows) * (model.layer_macs + model.head_macs) / linear_rate
            total += max(model.weights_bytes / read_rate, macs)
            for group in model.groups:
                keys = sum(min(row, group.window or row) for row in rows)
                total += keys * group.kv_bytes / read_rate
    return total


def describe(path: str) -> tuple[Model, dict[str, list[list[tuple[list[int], int]]]]]:
    loaded = load(path, executor=ExecutorConfig(kv_cache_memory=64 << 20))
    config = open_model(resolve(path)).config
    spec: KVSpec = loaded.plan.spec
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv + 3 * config.intermediate_size)
    model = Model(
        layer_macs=config.num_layers * layer,
        head_macs=config.hidden_size * config.vocab_size,
        weights_dtype=loaded.weights_dtype,
        weights_bytes=loaded.weights_bytes,
        groups=tuple(
            Group(group.window, len(group.layer_indices) * 2 * heads, group.bytes_per_token) for group in spec.groups
        ),
    )
    encode = loaded.tokenizer.encode
    loads = {
        name: [[(encode(one["prompt"]), one["max_tokens"]) for one in wave] for wave in waves]
        for name, waves in build().items()
    }
    return model, loads


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    prober = Prober(args.threads)
    peak = prober.measure()
    model, loads = describe(args.model)
    peak = peak.best(prober.measure())
    least = {name: seconds(waves, model, peak) for name, waves in loads.items()}
    output = {name: sum(limit for wave in waves for _, limit in wave) for name, waves in loads.items()}
    rows = {name: {"seconds": least[name], "out_tok_s": output[name] / least[name]} for name in loads}
    print(json.dumps({"probe": asdict(peak), "model": asdict(model), "workloads": rows}))


if __name__ == "__main__":
    main()
