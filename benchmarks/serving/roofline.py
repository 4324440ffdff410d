"""The least time that the workloads could take on this machine, from probes made now; prints one JSON object.

    python roofline.py MODEL.gguf [--threads N]

A model of an ideal engine with octavo's weights and cache: nothing is computed twice (prefixes that requests share are
computed once), int8 multiply-adds for the linear layers and bf16 ones for attention at the probed peaks, weights and K
and V read once a step at the probed bandwidth. Scales, norms, sampling, HTTP and the client cost nothing in it.
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
from probe import Probe, Prober  # noqa: E402


@dataclass(frozen=True, slots=True)
class Model:
    """What a token costs."""

    layer_macs: int  # multiply-adds of the linear layers, without the head
    head_macs: int
    attention_macs: int  # for each key that a token reads
    weights_bytes: int
    kv_bytes: int  # of one token in all layers


def seconds(waves: list[list[tuple[list[int], int]]], model: Model, peak: Probe) -> float:
    """waves of (prompt token ids, max_tokens); each wave begins when the one before has ended."""
    known: set[tuple[int, ...]] = set()  # prefixes whose K and V exist, one for each 16 tokens
    total = 0.0
    for wave in waves:
        for ids, _ in wave:
            blocks = [tuple(ids[: end + 16]) for end in range(0, len(ids) - 1, 16)]
            have = 16 * next((i for i, block in enumerate(blocks) if block not in known), len(blocks))
            known.update(blocks)
            have = min(have, len(ids) - 1)
            new = len(ids) - have
            keys = new * (have + len(ids) + 1) // 2
            total += (new * model.layer_macs + model.head_macs) / (peak.int8_gmac_s * 1e9)
            total += keys * model.attention_macs / (peak.bf16_gmac_s * 1e9)
        for step in range(1, max(limit for _, limit in wave)):
            rows = [len(ids) + step for ids, limit in wave if limit > step]
            macs = len(rows) * (model.layer_macs + model.head_macs) / (peak.int8_gmac_s * 1e9)
            total += max(model.weights_bytes / (peak.read_gb_s * 1e9), macs)
            total += sum(rows) * model.kv_bytes / (peak.read_gb_s * 1e9)
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
        attention_macs=config.num_layers * 2 * heads,
        weights_bytes=loaded.weights_bytes,
        kv_bytes=spec.bytes_per_token,
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
