"""What pooling KV heads costs: nats per token of a model with all its KV heads, and with fewer (`octavo convert`).

python benchmarks/quality/fewer_kv_heads.py MODEL --out benchmarks/results/fewer_kv_heads_NAME.json
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from about import commit, processor

from octavo.cli.convert import measure
from octavo.cli.sample_text import SAMPLE_TEXT
from octavo.engine.tokenizer import Tokenizer
from octavo.models.convert import pool_kv_heads
from octavo.models.loader import open_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    source = open_model(given.model)
    place = source.tokenizer_source
    if place.directory is not None:
        tokenizer = Tokenizer.from_directory(place.directory)
    else:
        assert place.gguf_metadata is not None
        tokenizer = Tokenizer.from_gguf_metadata(place.gguf_metadata)
    token_ids = tokenizer.encode(SAMPLE_TEXT)[: given.tokens]
    whole = source.config.num_kv_heads  # type: ignore[attr-defined]
    rows = [row(measure(source, token_ids))]
    for count in [count for count in range(whole - 1, 0, -1) if whole % count == 0]:
        with tempfile.TemporaryDirectory() as folder:
            pool_kv_heads(source, count, Path(folder))
            rows.append(row(measure(open_model(Path(folder)), token_ids)))
    found = {
        "model": given.model.name,
        "text": "octavo.cli.sample_text",
        "predicted_tokens": len(token_ids) - 1,
        "rows": rows,
        "machine": processor(),
        "versions": {"python": platform.python_version(), "numpy": version("numpy")},
        "commit": commit(),
        "command": f"python {Path(sys.argv[0]).as_posix()} {given.model.name} --tokens {given.tokens}",
    }
    given.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(rows, indent=2))


def row(measured: tuple[int, int, float]) -> dict[str, float]:
    heads, kv_bytes, nats = measured
    return {
        "kv_heads": heads,
        "kv_bytes_per_token_bf16": kv_bytes,
        "nats_per_token": round(nats, 4),
        "perplexity": round(math.exp(nats), 2),
    }


if __name__ == "__main__":
    main()
