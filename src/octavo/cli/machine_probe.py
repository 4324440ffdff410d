"""Measures what the machine can do for a model: how fast it reads memory, and how fast a linear layer runs.

Short runs, the best of a few, so that a busy neighbour matters little; none takes much more than a second. It does not
know what the numbers are good for.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from octavo.cli.units import MEBIBYTE
from octavo.errors import OctavoError

PROBE_BYTES = 256 * MEBIBYTE  # above the last-level cache of most machines
MIN_PROBE_BYTES = 16 * MEBIBYTE
REPEATS = 5
MATRIX_ROWS, MATRIX_SIZE = 128, 1024


def processor_name() -> str:
    """As the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def read_bandwidth(threads: int, available_bytes: int) -> float:
    """Bytes a second that `threads` threads together read from memory, one after the other in address order."""
    import numpy as np

    num_bytes = max(MIN_PROBE_BYTES, min(PROBE_BYTES, available_bytes // 8))
    values = np.ones(num_bytes // 4, np.float32)
    parts = np.array_split(values, threads)
    with ThreadPoolExecutor(threads) as pool:
        best_s = _best_s(lambda: list(pool.map(np.maximum.reduce, parts)))
    return values.nbytes / best_s


def linear_speed(threads: int, instruction_set: str, weights_dtype: str) -> float:
    """Floating-point operations a second (a multiply-add counts as two) of a linear layer with many rows."""
    import numpy as np

    from octavo.kernels.native import NativeOps

    ops = NativeOps(threads, instruction_set)
    weight = ops.pack_linear(np.ones((MATRIX_SIZE, MATRIX_SIZE), np.float32), None, weights_dtype)
    x = np.ones((MATRIX_ROWS, MATRIX_SIZE), np.float32)
    out = np.empty((MATRIX_ROWS, MATRIX_SIZE), np.float32)
    best_s = _best_s(lambda: ops.linear(x, weight, out))
    if out[0, 0] != MATRIX_SIZE:
        raise OctavoError(
            f"a linear layer of ones gave {out[0, 0]}, not {MATRIX_SIZE}, with instruction set "
            f"{ops.instruction_set} and {weights_dtype} weights; choose another with --instruction-set and report this"
        )
    return 2 * MATRIX_ROWS * MATRIX_SIZE**2 / best_s


def _best_s(run: Callable[[], object]) -> float:
    run()  # first touch: memory, threads
    best_s = float("inf")
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        run()
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s
