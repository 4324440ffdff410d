"""Paged attention against this machine's limits, probed in the same run: memory for decode, multiply-adds for prefill.

    PYTHONPATH=src python benchmarks/micro/attention.py [--json PATH] [--threads N] [--kv-format f32] [--only NAME]

SmolLM2-135M's shape: 30 layers, 9 query and 3 KV heads, head_dim 64; blocks of 16 tokens in random order. Sequences
take turns in a pool much larger than the caches, so that K and V are cold. Times are medians, all layers together.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from probe import Prober

from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32, AttentionBatch, KVLayer, RopeTable
from octavo.kv_formats import layout

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 30, 9, 3, 64
BLOCK_SIZE, POOL_TOKENS = 16, 16384
SCALE = HEAD_DIM**-0.5


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    milliseconds: float
    milliseconds_best: float
    milliseconds_p90: float
    achieved: float  # GB/s or G multiply-adds/s
    limit: float  # the same, probed
    unit: str


class Pool:
    """Random K and V of all layers, and random queries."""

    def __init__(self, kv_format: str, shuffled: bool) -> None:
        item_bytes = layout.codec(kv_format).ITEM_BYTES
        layer_bytes = 2 * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM * item_bytes
        block_bytes, num_blocks = NUM_LAYERS * layer_bytes, POOL_TOKENS // BLOCK_SIZE
        rng = np.random.default_rng(0)
        memory = np.empty(num_blocks * block_bytes + 64, np.uint8)
        offset = -memory.ctypes.data % 64
        pool = memory[offset : offset + num_blocks * block_bytes]
        tokens = rng.standard_normal((num_blocks * block_bytes // 30 // item_bytes // HEAD_DIM, HEAD_DIM), np.float32)
        encoded = layout.codec(kv_format).encode_k(tokens[: len(tokens) // 16 * 16].reshape(16, -1))
        pool.reshape(NUM_LAYERS, -1)[...] = encoded
        self.layers = [
            KVLayer(pool, block_bytes, i * layer_bytes, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, kv_format)
            for i in range(NUM_LAYERS)
        ]
        self.bytes_per_token = 2 * NUM_KV_HEADS * HEAD_DIM * item_bytes  # of one layer
        self.blocks = (rng.permutation(num_blocks) if shuffled else np.arange(num_blocks)).astype(np.int32)
        self.q: F32 = rng.standard_normal((5456, NUM_HEADS, HEAD_DIM), np.float32)
        self.out = np.empty_like(self.q)
        self._next = 0

    def take(self, num_tokens: int) -> np.ndarray:
        """The blocks of the next sequence; the pool is used round and round."""
        count = -(-num_tokens // BLOCK_SIZE)
        if self._next + count > len(self.blocks):
            self._next = 0
        self._next += count
        return self.blocks[self._next - count : self._next]

    def batch(self, lengths: list[int], num_rows: int) -> AttentionBatch:
        """Sequences of these lengths, each with its last `num_rows` rows in the step."""
        table = np.stack([self.take(n) for n in lengths])
        starts = np.array([n - num_rows for n in lengths], np.int32)
        return AttentionBatch(np.arange(len(lengths) + 1, dtype=np.int32) * num_rows, starts, table[None])


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def summary(times: list[float], layers: int = 1) -> tuple[float, float, float]:
    """Median, best and 90th percentile."""
    ordered = sorted(time * layers for time in times)
    return statistics.median(ordered), ordered[0], ordered[len(ordered) * 9 // 10]


def decode(ops: NativeOps, pool: Pool, prober: Prober, context: int, num_sequences: int, repeats: int) -> Result:
    """One row a sequence, at the end of `context` tokens, all layers; the probe runs between the steps."""
    times, probes = [], []
    q, out = pool.q[:num_sequences], pool.out[:num_sequences]

    def step(batch: AttentionBatch) -> None:
        for layer in pool.layers:
            ops.paged_attention(q, batch, layer, SCALE, out)

    for _ in range(repeats):
        probes.append(prober.read_gb_s(128, 1))
        batch = pool.batch([context] * num_sequences, 1)
        times.append(timed(lambda batch=batch: step(batch)))  # type: ignore[misc]
    median, best, p90 = summary(times)
    read = num_sequences * context * pool.bytes_per_token * NUM_LAYERS
    name = f"decode {context}" if num_sequences == 1 else f"decode {num_sequences}x{context}"
    return Result(name, median, best, p90, read / median / 1e6, statistics.median(probes), "GB/s")


def prefill(ops: NativeOps, pool: Pool, num_tokens: int, peak: float, repeats: int) -> Result:
    """A whole prompt in one call; one layer is timed at a time, and the time is that of all."""
    q, out = pool.q[:num_tokens], pool.out[:num_tokens]
    batch = pool.batch([num_tokens], num_tokens)
    times = []
    for i in range(repeats):
        layer = pool.layers[i % NUM_LAYERS]
        times.append(timed(lambda layer=layer: ops.paged_attention(q, batch, layer, SCALE, out)))  # type: ignore[misc]
    median, best, p90 = summary(times, NUM_LAYERS)
    macs = num_tokens * (num_tokens + 1) / 2 * NUM_HEADS * HEAD_DIM * 2 * NUM_LAYERS
    return Result(f"prefill {num_tokens}", median, best, p90, macs / median / 1e6, peak, "GMAC/s")


def rope_write(ops: NativeOps, pool: Pool, num_tokens: int, limit: float) -> Result:
    """Rotation and writing of a prompt; the bytes are those read of q, k and v and written to q, K and V."""
    width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    qkv = np.random.default_rng(1).standard_normal((num_tokens, width), np.float32)
    angles = np.random.default_rng(2).random((POOL_TOKENS, HEAD_DIM // 2), np.float32)
    rope = RopeTable(np.cos(angles), np.sin(angles))
    batch, out = pool.batch([num_tokens], num_tokens), pool.out[:num_tokens]
    times = [timed(lambda i=i: ops.rope_write(qkv, batch, rope, pool.layers[i], out)) for i in range(NUM_LAYERS)]  # type: ignore[misc]
    median, best, p90 = summary(times, NUM_LAYERS)
    moved = (qkv.nbytes + out.nbytes + num_tokens * pool.bytes_per_token) * NUM_LAYERS
    return Result(f"rope_write {num_tokens}", median, best, p90, moved / median / 1e6, limit, "GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--kv-format", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--instruction-set", default="auto")
    parser.add_argument("--ordered", action="store_true", help="blocks in ascending order instead of shuffled")
    parser.add_argument("--only", default="", help="only results whose name contains this")
    arguments = parser.parse_args()
    ops = NativeOps(arguments.threads, arguments.instruction_set)
    prober, pool = Prober(ops.num_threads), Pool(arguments.kv_format, not arguments.ordered)
    probe = prober.measure()
    is_dot = ops.instruction_set == "avx512_bf16" and arguments.kv_format == "bf16"
    peak = probe.bf16_gmac_s if is_dot else probe.f32_gmac_s
    runs: dict[str, Callable[[], Result]] = {
        "decode 512": lambda: decode(ops, pool, prober, 512, 1, 81),
        "decode 2048": lambda: decode(ops, pool, prober, 2048, 1, 61),
        "decode 8192": lambda: decode(ops, pool, prober, 8192, 1, 41),
        "decode 32x512": lambda: decode(ops, pool, prober, 512, 32, 21),
        "prefill 1636": lambda: prefill(ops, pool, 1636, peak, 15),
        "prefill 5456": lambda: prefill(ops, pool, 5456, peak, 9),
        "rope_write 1": lambda: rope_write(ops, pool, 1, probe.read_gb_s),
        "rope_write 512": lambda: rope_write(ops, pool, 512, probe.read_gb_s),
    }
    results = []
    for name, run in runs.items():
        if arguments.only not in name:
            continue
        found = run()
        results.append(found)
        share = found.achieved / found.limit
        print(
            f"{found.name:16s} {found.milliseconds:9.3f} ms (best {found.milliseconds_best:9.3f}, "
            f"p90 {found.milliseconds_p90:9.3f})  "
            f"{found.achieved:6.1f} of {found.limit:6.1f} {found.unit} = {share:4.0%}"
        )
    if arguments.json:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        report = {
            "commit": commit,
            "machine": {"processor": platform.processor(), "threads": ops.num_threads},
            "instruction_set": ops.instruction_set,
            "kv_format": arguments.kv_format,
            "probe": asdict(probe),
            "results": [asdict(result) for result in results],
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
