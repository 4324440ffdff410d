"""What keeping fewer tokens costs: nats per token of a long text under each `--kv-policy`, beside the memory it holds.

python benchmarks/quality/dropped_tokens.py MODEL --text FILE --out benchmarks/results/dropped_tokens.json

Every token of the text but the first is predicted from what its policy has kept of the text before it. "late" is the
half of the text at its end, where most has been dropped.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from octavo import LLM, SamplingParams
from octavo.core.streaming import parse_policy

POLICIES = ("all", "streaming:4,1024,128", "streaming:4,512,128", "streaming:4,256,64", "streaming:4,128,64")


def read(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()


def row(model: str, text: str, policy: str, num_tokens: int) -> dict[str, object]:
    with LLM(model, kv_policy=policy, max_model_len=num_tokens + 1, kv_cache_memory=256 << 20) as llm:
        token_ids = llm.model.tokenizer.encode(text)[:num_tokens]
        (answer,) = llm.generate(token_ids, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        assert answer.prompt_logprobs is not None
        nats = [-score.logprob for score in answer.prompt_logprobs if score is not None and score.logprob is not None]
        assert len(nats) == num_tokens - 1
        keep, spec = parse_policy(policy), llm.model.plan.spec
        slots = num_tokens if keep is None else min(num_tokens, keep.plan(spec.block_size).capacity)
        late = nats[len(nats) // 2 :]
        return {
            "kv_policy": policy,
            "most_kept_tokens": slots,
            "kv_bytes": spec.pool_bytes(spec.blocks_for_tokens(slots)),
            "dropped_tokens": llm.model.core.status().dropped_tokens,
            "nats_per_token": round(sum(nats) / len(nats), 4),
            "perplexity": round(math.exp(sum(nats) / len(nats)), 2),
            "late_nats_per_token": round(sum(late) / len(late), 4),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    text, rows = read(given.text), []
    for policy in POLICIES:
        rows.append(row(str(given.model), text, policy, given.tokens))
        print(json.dumps(rows[-1]), flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    command = f"python {Path(sys.argv[0]).name} {given.model.name} --text {given.text.name} --tokens {given.tokens}"
    about = {
        "model": given.model.name,
        "text": given.text.name,
        "predicted_tokens": given.tokens - 1,
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), "numpy": version("numpy")},
        "commit": commit,
        "command": command,
    }
    given.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
