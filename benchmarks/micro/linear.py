"""The linear layers of SmolLM2-135M against what the machine can do: memory reads for few rows, multiply-adds for many.

    python benchmarks/micro/linear.py [--threads N] [--weights-dtype f32|bf16|int8|int4|q4_1] [--json PATH]

Weights are read from memory: each call takes the next of several copies, more than the caches hold. `best` is the 10th
percentile and `median` the 50th: on a shared machine the first says what the kernel does, the second what one gets.
`share` compares the best time with the roofline: the longer of reading the weights and of the multiply-adds, at the
probe's figures. The probe runs again before each shape, and the highest figures count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from probe import Prober

from octavo.kernels.native import NativeOps, usable_cores
from octavo.kernels.ops import F32, PackedLinear
from octavo.kernels.weight_groups import BLOCK_BYTES

sys.path.insert(0, str(Path(__file__).parents[1] / "quality"))
from about import commit, processor

SHAPES = {"qkv": (576, 960), "out": (576, 576), "gate_up": (576, 3072), "down": (1536, 576), "head": (576, 49152)}
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 512]
COPIES_BYTES = 160 << 20
MEASURE_S = 0.25


@dataclass(frozen=True, slots=True)
class Result:
    shape: str
    num_inputs: int
    num_outputs: int
    rows: int
    best_ms: float
    median_ms: float
    weights_gb_s: float
    gmac_s: float
    share: float = 0.0


def measure(ops: NativeOps, shape: str, rows: int, packed: list[object]) -> Result:
    num_inputs, num_outputs = SHAPES[shape]
    x = np.random.default_rng(rows).standard_normal((rows, num_inputs), np.float32)
    out = np.empty((rows, num_outputs), np.float32)
    times: list[float] = []
    while sum(times) < MEASURE_S or len(times) < 7:
        weight = packed[len(times) % len(packed)]
        start = time.perf_counter()
        ops.linear(x, weight, out)  # type: ignore[arg-type]
        times.append(time.perf_counter() - start)
    times.sort()
    best, median = times[len(times) // 10], times[len(times) // 2]
    num_bytes = packed[0].num_bytes  # type: ignore[attr-defined]
    macs = rows * num_inputs * num_outputs
    return Result(
        shape, num_inputs, num_outputs, rows, best * 1e3, median * 1e3, num_bytes / best / 1e9, macs / best / 1e9
    )


def pack(ops: NativeOps, weight: F32, form: str) -> PackedLinear:
    """form: a weights dtype, or q4_1 for random blocks of that kind (4 bits with a minimum)."""
    if form != "q4_1":
        return ops.pack_linear(weight, None, form)
    row_bytes = weight.shape[1] // 32 * BLOCK_BYTES[form]
    return ops.pack_blocks(np.random.default_rng(0).integers(0, 64, (len(weight), row_bytes), np.uint8), None, form)


def run(args: argparse.Namespace) -> dict[str, object]:
    ops = NativeOps(args.threads, args.instruction_set)
    prober = Prober(ops.num_threads)
    peak = prober.measure()
    multiplies_bf16 = args.weights_dtype == "bf16" and ops.instruction_set == "avx512_bf16"
    results: list[Result] = []
    for shape, (num_inputs, num_outputs) in SHAPES.items():
        peak = peak.best(prober.measure())
        weight = np.random.default_rng(0).standard_normal((num_outputs, num_inputs), np.float32)
        packed = [pack(ops, weight, args.weights_dtype)]
        packed += [pack(ops, weight, args.weights_dtype) for _ in range(COPIES_BYTES // packed[0].num_bytes)]
        results += [measure(ops, shape, rows, list(packed)) for rows in args.rows if rows <= 128 or shape != "head"]
    gmac = peak.bf16_gmac_s if multiplies_bf16 else peak.f32_gmac_s
    if args.weights_dtype not in ("f32", "bf16"):
        gmac = peak.int8_gmac_s or peak.f32_gmac_s
    read = peak.read_gb_s
    print(
        f"{ops.instruction_set}, {ops.num_threads} threads, {args.weights_dtype} weights; "
        f"probes: {read:.1f} GB/s read, {peak.f32_gmac_s:.0f} GMAC/s f32, {peak.bf16_gmac_s:.0f} GMAC/s bf16, "
        f"{peak.int8_gmac_s:.0f} GMAC/s int8"
    )
    print("shape     rows    best ms  median ms   GB/s  GMAC/s  share")
    rooflines = []
    for r in results:
        share = max(r.weights_gb_s / read, r.gmac_s / gmac)
        print(
            f"{r.shape:8s} {r.rows:5d} {r.best_ms:10.4f} {r.median_ms:10.4f} "
            f"{r.weights_gb_s:6.1f} {r.gmac_s:7.1f}   {share:4.0%}"
        )
        rooflines.append({**asdict(r), "share": share})
    return {
        "machine": processor(),
        "cores": usable_cores(),
        "load_average": os.getloadavg()[0],
        "commit": commit(),
        "instruction_set": ops.instruction_set,
        "threads": ops.num_threads,
        "weights_dtype": args.weights_dtype,
        "probe": asdict(peak),
        "results": rooflines,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--weights-dtype", choices=["f32", "bf16", "int8", "int4", "q4_1"], default="bf16")
    parser.add_argument("--instruction-set", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = run(args)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
