"""Paged attention against this machine's limits, probed in the same run: memory for decode, multiply-adds for prefill.

    PYTHONPATH=src python benchmarks/micro/attention.py [--json PATH] [--kv-formats bf16,int8] [--only NAME]

SmolLM2-135M's shape: 30 layers, 9 query and 3 KV heads, head_dim 64; blocks of 16 tokens in random order. Sequences
take turns in a pool much larger than the caches, so that K and V are cold. Times are of all layers together; formats
take turns within each round. The processor's clock tells what a busy neighbour hides; its limits are one thread's. The
peak beside prefill is that of bf16 products, also for formats that are multiplied as bytes and may pass it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from probe import Prober

from octavo.core.kv_bytes import FORMAT_BYTES, vector_bytes
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32, AttentionBatch, KVLayer
from octavo.kv_formats import layout
from octavo.kv_formats.hadamard import TURNED_FORMATS

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 30, 9, 3, 64
BLOCK_SIZE, POOL_TOKENS = 16, 16384
SCALE = HEAD_DIM**-0.5


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    kv_format: str
    clock: str  # "wall" with all threads, or "processor": the time of one thread on its processor, beside others' work
    milliseconds_best: float
    milliseconds: float  # median
    achieved: float  # GB/s or G multiply-adds/s, of the best
    limit: float  # the same, the best probe of this run; of one thread for clock "processor"
    unit: str
    # Of decode, the median of rounds: what was achieved against a probe just before it. A shared machine's memory is
    # twice as fast in one minute as in another, and the best of each may be from different ones. Else None.
    share_of_probe: float | None


@dataclass(frozen=True, slots=True)
class Case:
    """All layers for one row at the end of `context` tokens in each sequence, or for a whole prompt of that length."""

    name: str
    context: int
    num_sequences: int
    is_prefill: bool


CASES = (
    Case("decode 512", 512, 1, False),
    Case("decode 2048", 2048, 1, False),
    Case("decode 8192", 8192, 1, False),
    Case("decode 32x512", 512, 32, False),
    Case("prefill 1636", 1636, 1, True),
    Case("prefill 5456", 5456, 1, True),
)


class Pool:
    """Random K and V of all layers, and random queries."""

    def __init__(self, kv_format: str, shuffled: bool) -> None:
        self.kv_format = kv_format
        self.bytes_per_token = NUM_KV_HEADS * vector_bytes(kv_format, HEAD_DIM)  # of one layer
        layer_bytes = BLOCK_SIZE * self.bytes_per_token
        tail_bytes = (
            0  # of a layer: bf16 keys of the same tokens, where the format has tails; read of the last tile only
        )
        if FORMAT_BYTES[kv_format].tail_format is not None:
            tail_bytes = BLOCK_SIZE * NUM_KV_HEADS * vector_bytes("bf16", HEAD_DIM, "tail")
        block_bytes, num_blocks = NUM_LAYERS * (layer_bytes + tail_bytes), POOL_TOKENS // BLOCK_SIZE
        rng = np.random.default_rng(0)
        memory = np.empty(num_blocks * block_bytes + 64, np.uint8)
        offset = -memory.ctypes.data % 64
        pool = memory[offset : offset + num_blocks * block_bytes]
        self.layers = [
            KVLayer(
                pool,
                block_bytes,
                i * layer_bytes,
                BLOCK_SIZE,
                NUM_KV_HEADS,
                HEAD_DIM,
                kv_format,
                is_turned=kv_format in TURNED_FORMATS,
            )
            for i in range(NUM_LAYERS)
        ]
        blocks, tile = pool.reshape(num_blocks, block_bytes), self._random_tile(rng)
        blocks[:, : NUM_LAYERS * layer_bytes] = np.tile(tile, NUM_LAYERS * layer_bytes // len(tile))
        if tail_bytes:
            blocks[:, NUM_LAYERS * layer_bytes :] = 0
            places = [NUM_LAYERS * layer_bytes + i * tail_bytes for i in range(NUM_LAYERS)]
            tails = [
                replace(layer, layer_offset=place, kv_format="bf16", group=1, kind="tail")
                for layer, place in zip(self.layers, places, strict=True)
            ]
            self.layers = [replace(layer, tail=tail) for layer, tail in zip(self.layers, tails, strict=True)]
        self.blocks = (rng.permutation(num_blocks) if shuffled else np.arange(num_blocks)).astype(np.int32)
        self.q: F32 = rng.standard_normal((5456, NUM_HEADS, HEAD_DIM), np.float32)
        self.out = np.empty_like(self.q)
        self._next = 0

    def _random_tile(self, rng: np.random.Generator) -> np.ndarray:
        form, (k_bytes, v_bytes) = layout.codec(self.kv_format), layout.tile_bytes(self.layers[0])
        tile = np.zeros(k_bytes + v_bytes, np.uint8)
        form.write_k(tile[:k_bytes], 0, rng.standard_normal((16, HEAD_DIM), np.float32))
        form.write_v(tile[k_bytes:], 0, rng.standard_normal((16, HEAD_DIM), np.float32))
        return tile

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
        return AttentionBatch(np.arange(len(lengths) + 1, dtype=np.int32) * num_rows, starts, np.stack([table, table]))


class Runner:
    """One set of operations, its clock and its limits."""

    def __init__(self, ops: NativeOps, clock: str) -> None:
        self.ops, self.clock = ops, clock
        self.prober = Prober(ops.num_threads)
        self.reads: list[float] = []
        self.times: dict[tuple[Case, str], list[float]] = {}
        self.shares: dict[tuple[Case, str], list[float]] = {}

    def run(self, case: Case, pool: Pool, round_index: int) -> None:
        """One measurement. A prefill takes one layer, and its time counts for all."""
        now = time.perf_counter if self.clock == "wall" else time.thread_time
        rows = case.context if case.is_prefill else 1
        batch = pool.batch([case.context] * case.num_sequences, rows)
        q, out = (array[: rows * case.num_sequences] for array in (pool.q, pool.out))
        layers = [pool.layers[round_index % NUM_LAYERS]] if case.is_prefill else pool.layers
        probe = 0.0 if case.is_prefill else self.prober.read_gb_s(128, 1)
        start = now()
        for layer in layers:
            self.ops.paged_attention(q, batch, layer, SCALE, out)
        seconds = (now() - start) * NUM_LAYERS / len(layers)
        self.times.setdefault((case, pool.kv_format), []).append(seconds)
        if not case.is_prefill:
            self.reads.append(probe)
            read = _bytes_read(case, pool.bytes_per_token) / seconds / 1e9
            self.shares.setdefault((case, pool.kv_format), []).append(read / probe)

    def results(self, bytes_per_token: dict[str, int]) -> list[Result]:
        probe = self.prober.measure()
        found = []
        for (case, kv_format), times in self.times.items():
            best = min(times)
            if case.is_prefill:
                is_dot = self.ops.instruction_set == "avx512_bf16" and kv_format not in ("f32", "f16")
                macs = case.context * (case.context + 1) / 2 * NUM_HEADS * HEAD_DIM * 2 * NUM_LAYERS
                achieved, limit, unit = macs / best / 1e9, probe.bf16_gmac_s if is_dot else probe.f32_gmac_s, "GMAC/s"
            else:
                read = _bytes_read(case, bytes_per_token[kv_format])
                achieved, limit, unit = read / best / 1e9, max([*self.reads, probe.read_gb_s]), "GB/s"
            median, shares = statistics.median(times), self.shares.get((case, kv_format))
            share = statistics.median(shares) if shares else None
            found.append(
                Result(case.name, kv_format, self.clock, best * 1e3, median * 1e3, achieved, limit, unit, share)
            )
        return found


def _bytes_read(case: Case, bytes_per_token: int) -> int:
    return case.num_sequences * case.context * bytes_per_token * NUM_LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--threads", type=int, default=0, help="of the wall clock; 0: one per core")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--kv-formats", default="bf16,int8", help=", ".join(FORMAT_BYTES))
    parser.add_argument("--instruction-set", default="auto")
    parser.add_argument("--ordered", action="store_true", help="blocks in ascending order instead of shuffled")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    arguments = parser.parse_args()
    runners = [
        Runner(NativeOps(arguments.threads, arguments.instruction_set), "wall"),
        Runner(NativeOps(1, arguments.instruction_set), "processor"),
    ]
    pools = [Pool(kv_format, not arguments.ordered) for kv_format in arguments.kv_formats.split(",")]
    for round_index in range(arguments.rounds):
        for runner in runners:
            for case in CASES:
                for pool in pools:
                    if arguments.only in case.name:
                        runner.run(case, pool, round_index)
    bytes_per_token = {pool.kv_format: pool.bytes_per_token for pool in pools}
    results = [result for runner in runners for result in runner.results(bytes_per_token)]
    for found in results:
        print(
            f"{found.name:14s} {found.kv_format:9s} {found.clock:9s} best {found.milliseconds_best:9.3f} ms, median "
            f"{found.milliseconds:9.3f}  {found.achieved:6.1f} of {found.limit:6.1f} {found.unit} = "
            f"{found.achieved / found.limit:4.0%}"
            + ("" if found.share_of_probe is None else f", {found.share_of_probe:4.0%} in the median round")
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(report(runners[0], results, arguments.rounds), indent=2) + "\n")


def report(runner: Runner, results: list[Result], rounds: int) -> dict[str, object]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "threads": runner.ops.num_threads,
            "load_average": os.getloadavg()[0],
        },
        "instruction_set": runner.ops.instruction_set,
        "rounds": rounds,
        "results": [asdict(result) for result in results],
    }


if __name__ == "__main__":
    main()
