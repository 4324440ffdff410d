"""How far weights and KV dtypes move a model's answers from those in f32, token by token; other engines beside.

    python benchmarks/quality/kl.py MODEL TEXT... [--tokens N] [--weights-dtypes int8 bf16] [--kv-dtypes bf16 f32]
        [--peer llama.cpp=PYTHON] [--peer openvino=PYTHON] [--json PATH]

A TEXT is read in chunks of 512 tokens, each from an empty context. For every token: the Kullback-Leibler divergence
from the distribution of the model in f32 (f32 weights, f32 KV), in nats, and whether both have the same most likely
token. The peers get as many threads as octavo.
PYTHON is an interpreter with the peer installed; peers read the same file and get the same token ids.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from about import commit, processor
from peer import WORKERS, Peer

from octavo.core.kv_spec import KVSpec
from octavo.engine.tokenizer import Tokenizer
from octavo.executor.kv_storage import KVStorage
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32, I32, AttentionBatch
from octavo.models.hub import resolve
from octavo.models.loader import CausalLM, ModelSource, load_model, open_model

BLOCK_SIZE = 16


class Engine(Protocol):
    name: str

    def logits(self, ids: I32, vocab_size: int) -> F32:
        """[tokens, vocab_size], from an empty context; the caller's to change."""
        ...


class Octavo:
    """A model in one dtype of weights and one of KV."""

    def __init__(self, model: CausalLM, weights_dtype: str, kv_dtype: str, chunk: int) -> None:
        self.name = f"octavo, weights {weights_dtype}, KV {kv_dtype}"
        self._model = model
        num_blocks = -(-chunk // BLOCK_SIZE)
        groups = model.kv_groups(kv_dtype)
        self._storage = KVStorage(KVSpec(groups, BLOCK_SIZE), len(groups) * num_blocks)
        self._tables = np.arange(len(groups) * num_blocks, dtype=np.int32).reshape(len(groups), 1, num_blocks)

    def logits(self, ids: I32, vocab_size: int) -> F32:
        start = np.array([0, len(ids)], np.int32)
        batch = AttentionBatch(start, np.zeros(1, np.int32), self._tables)
        logits = self._model.forward(ids, batch, self._storage.layers, np.arange(len(ids), dtype=np.int32))
        assert logits.shape[1] == vocab_size
        return logits


@dataclass(frozen=True, slots=True)
class Quality:
    name: str
    kl_mean: float
    kl_error: float  # standard error of kl_mean, from the means of the chunks
    kl_p99: float
    kl_max: float
    top1_agreement: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class Expected:
    """What the reference says of a chunk."""

    logarithms: F32  # [tokens, vocabulary]
    probabilities: F32
    best: npt.NDArray[np.int64]  # [tokens]

    @classmethod
    def of(cls, logits: F32) -> Expected:
        logarithms = log_probabilities(logits)
        return cls(logarithms, np.exp(logarithms), logarithms.argmax(axis=1))


class Tally:
    """What is kept of one engine's chunks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._divergence: list[F32] = []
        self._agreement: list[F32] = []
        self._surprise: list[F32] = []

    def add(self, found: F32, expected: Expected, ids: I32) -> None:
        """Logarithms of probabilities [tokens, vocabulary]; `found` is overwritten."""
        self._surprise.append(-found[np.arange(len(ids) - 1), ids[1:]])
        self._agreement.append((found.argmax(axis=1) == expected.best).astype(np.float32))
        np.subtract(expected.logarithms, found, out=found)
        self._divergence.append(
            np.einsum("ij,ij->i", found, expected.probabilities, dtype=np.float64).astype(np.float32)
        )

    def quality(self) -> Quality:
        kl, of_chunks = np.concatenate(self._divergence), [part.mean(dtype=np.float64) for part in self._divergence]
        return Quality(
            name=self.name,
            kl_mean=float(kl.mean(dtype=np.float64)),
            kl_error=float(np.std(of_chunks, ddof=1) / len(of_chunks) ** 0.5) if len(of_chunks) > 1 else 0.0,
            kl_p99=float(np.quantile(kl, 0.99)),
            kl_max=float(kl.max()),
            top1_agreement=float(np.concatenate(self._agreement).mean(dtype=np.float64)),
            perplexity=float(np.exp(np.concatenate(self._surprise).mean(dtype=np.float64))),
        )


def tokenizer_of(source: ModelSource) -> Tokenizer:
    place = source.tokenizer_source
    if place.directory is not None:
        return Tokenizer.from_directory(place.directory)
    assert place.gguf_metadata is not None
    return Tokenizer.from_gguf_metadata(place.gguf_metadata)


def read_ids(tokenizer: Tokenizer, path: Path, count: int) -> I32:
    read = gzip.open if path.suffix == ".gz" else open
    with read(path, "rt", encoding="utf-8") as file:
        text = str(file.read(count * 8))
    return np.array(tokenizer.encode(text, add_special_tokens=False)[:count], np.int32)


def compare(reference: Engine, others: list[Engine], ids: I32, chunk: int, vocab_size: int) -> list[Quality]:
    tallies = [Tally(one.name) for one in [reference, *others]]
    for first in range(0, len(ids), chunk):
        part = ids[first : first + chunk]
        expected = Expected.of(reference.logits(part, vocab_size))
        tallies[0].add(expected.logarithms.copy(), expected, part)
        for one, tally in zip(others, tallies[1:], strict=True):
            tally.add(log_probabilities(one.logits(part, vocab_size)), expected, part)
    return [tally.quality() for tally in tallies]


def log_probabilities(logits: F32) -> F32:
    """In place."""
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))  # sums of pairs: the error is far below what is told
    return logits


def open_peers(specs: list[str], model: Path, chunk: int, threads: int) -> list[Peer]:
    peers = []
    for spec in specs:
        name, _, interpreter = spec.partition("=")
        if name not in WORKERS or not interpreter:
            raise SystemExit(f"--peer {spec!r} is not NAME=PYTHON with a NAME of {', '.join(WORKERS)}")
        peers.append(Peer(name, interpreter, model, chunk, threads))
    return peers


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--weights-dtypes", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--kv-dtypes", nargs="+", default=["bf16"])
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--instruction-set", default="auto")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def show(text: str, num_tokens: int, results: list[Quality]) -> None:
    print(f"{text}, {num_tokens} tokens               KL mean    error    KL p99    KL max   top-1   perplexity")
    for one in results:
        print(
            f"{one.name:40s} {one.kl_mean:9.5f} {one.kl_error:8.5f} {one.kl_p99:9.5f} {one.kl_max:9.5f}  "
            f"{one.top1_agreement:6.2%}   {one.perplexity:9.4f}",
            flush=True,
        )


def main() -> None:
    args = parse()
    ops = NativeOps(args.threads, args.instruction_set)
    path = resolve(args.model)
    source = open_model(path)
    tokenizer, vocab_size = tokenizer_of(source), source.config.vocab_size
    models = {dtype: load_model(source, ops, dtype) for dtype in dict.fromkeys(["f32", *args.weights_dtypes])}
    reference = Octavo(models["f32"], "f32", "f32", args.chunk)
    pairs = [(weights, kv) for weights in args.weights_dtypes for kv in args.kv_dtypes]
    others = [Octavo(models[w], w, kv, args.chunk) for w, kv in pairs if (w, kv) != ("f32", "f32")]
    peers = open_peers(args.peer, path, args.chunk, ops.num_threads)
    report: dict[str, Any] = {
        "machine": processor(),
        "cores": os.cpu_count(),
        "commit": commit(),
        "instruction_set": ops.instruction_set,
        "model": path.name,
        "digest": source.digest,
        "weights_bytes": {dtype: model.weights_bytes for dtype, model in models.items()},
        "peers": {peer.name: peer.about for peer in peers},
        "chunk": args.chunk,
        "texts": [],
    }
    for text in args.texts:
        ids = read_ids(tokenizer, text, args.tokens)
        results = compare(reference, [*others, *peers], ids, args.chunk, vocab_size)
        show(text.name, len(ids), results)
        report["texts"].append({"text": text.name, "tokens": len(ids), "results": [asdict(one) for one in results]})
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    for peer in peers:
        peer.close()


if __name__ == "__main__":
    main()
