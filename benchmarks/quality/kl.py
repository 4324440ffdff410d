"""How far weights and KV dtypes move a model's answers from those in f32, token by token of a text.

    python benchmarks/quality/kl.py MODEL TEXT [--tokens N] [--weights-dtypes int8 bf16] [--json PATH]

TEXT is read in chunks of 512 tokens, each from an empty context. For every token: the Kullback-Leibler divergence from
the f32 model's distribution (f32 weights, f32 KV) in nats, and whether both have the same most likely token.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from octavo.core.kv_spec import KVSpec
from octavo.engine.tokenizer import Tokenizer
from octavo.executor.kv_storage import KVStorage
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32, I32, AttentionBatch
from octavo.models.hub import resolve
from octavo.models.loader import ModelSource, load_model, open_model

BLOCK_SIZE = 16


class Runner:
    """A model in one dtype of weights and one of KV."""

    def __init__(self, source: ModelSource, ops: NativeOps, weights_dtype: str, kv_dtype: str, chunk: int) -> None:
        self.name = f"weights {weights_dtype}, KV {kv_dtype}"
        self.model = load_model(source, ops, weights_dtype)
        num_blocks = -(-chunk // BLOCK_SIZE)
        self._storage = KVStorage(KVSpec(self.model.kv_groups(kv_dtype), BLOCK_SIZE), num_blocks)
        self._table = np.arange(num_blocks, dtype=np.int32)[np.newaxis]

    def log_probabilities(self, ids: I32) -> F32:
        """[tokens, vocabulary]"""
        start = np.array([0, len(ids)], np.int32)
        batch = AttentionBatch(start, np.zeros(1, np.int32), self._table)
        logits = self.model.forward(ids, batch, self._storage.layers, np.arange(len(ids), dtype=np.int32))
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
        return logits


@dataclass(frozen=True, slots=True)
class Quality:
    name: str
    weights_bytes: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    perplexity: float


def read_ids(source: ModelSource, path: Path, count: int) -> I32:
    read = gzip.open if path.suffix == ".gz" else open
    with read(path, "rt", encoding="utf-8") as file:
        text = str(file.read(count * 8))
    place = source.tokenizer_source
    if place.directory is not None:
        tokenizer = Tokenizer.from_directory(place.directory)
    else:
        assert place.gguf_metadata is not None
        tokenizer = Tokenizer.from_gguf_metadata(place.gguf_metadata)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return np.array(ids[:count], np.int32)


def compare(reference: Runner, others: list[Runner], ids: I32, chunk: int) -> list[Quality]:
    divergence: dict[str, list[F32]] = {one.name: [] for one in others}
    agreement: dict[str, list[F32]] = {one.name: [] for one in others}
    surprise: dict[str, list[F32]] = {one.name: [] for one in [reference, *others]}
    for first in range(0, len(ids), chunk):
        part = ids[first : first + chunk]
        expected = reference.log_probabilities(part)
        probability, best = np.exp(expected), expected.argmax(axis=1)
        rows = np.arange(len(part) - 1)
        surprise[reference.name].append(-expected[rows, part[1:]])
        for one in others:
            found = one.log_probabilities(part)
            surprise[one.name].append(-found[rows, part[1:]])
            agreement[one.name].append((found.argmax(axis=1) == best).astype(np.float32))
            np.subtract(expected, found, out=found)
            found *= probability
            divergence[one.name].append(found.sum(axis=1, dtype=np.float64).astype(np.float32))
    perplexity = {name: float(np.exp(np.concatenate(parts).mean(dtype=np.float64))) for name, parts in surprise.items()}
    found_all = [Quality(reference.name, reference.model.weights_bytes, 0, 0, 0, 1, perplexity[reference.name])]
    for one in others:
        kl, same = np.concatenate(divergence[one.name]), np.concatenate(agreement[one.name])
        figures = (float(kl.mean(dtype=np.float64)), float(np.quantile(kl, 0.99)), float(kl.max()), float(same.mean()))
        found_all.append(Quality(one.name, one.model.weights_bytes, *figures, perplexity[one.name]))
    return found_all


def commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--weights-dtypes", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--kv-dtypes", nargs="+", default=["bf16"])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--instruction-set", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ops = NativeOps(args.threads, args.instruction_set)
    source = open_model(resolve(args.model))
    ids = read_ids(source, args.text, args.tokens)
    reference = Runner(source, ops, "f32", "f32", args.chunk)
    others = [Runner(source, ops, w, kv, args.chunk) for w in args.weights_dtypes for kv in args.kv_dtypes]
    results = compare(reference, others, ids, args.chunk)
    print(f"{len(ids)} tokens of {args.text.name} in chunks of {args.chunk}, {ops.instruction_set}")
    print("                           weights MB   KL mean    KL p99    KL max   top-1   perplexity")
    for one in results:
        print(
            f"{one.name:26s} {one.weights_bytes / 1e6:10.1f} {one.kl_mean:9.5f} {one.kl_p99:9.5f} {one.kl_max:9.5f}  "
            f"{one.top1_agreement:6.2%}   {one.perplexity:9.4f}"
        )
    if args.json:
        report = {
            "machine": processor(),
            "cores": os.cpu_count(),
            "commit": commit(),
            "instruction_set": ops.instruction_set,
            "model": Path(args.model).name,
            "digest": source.digest,
            "text": args.text.name,
            "tokens": len(ids),
            "chunk": args.chunk,
            "results": [asdict(one) for one in results],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
