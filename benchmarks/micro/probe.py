"""What this machine can do at most, measured now: sequential reads and multiply-adds. Needs a C++ compiler."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("probe.cpp")


@dataclass(frozen=True, slots=True)
class Probe:
    read_gb_s: float
    f32_gmac_s: float
    bf16_gmac_s: float  # 0 where no instruction multiplies bf16
    int8_gmac_s: float  # 0 without VNNI

    def best(self, other: Probe) -> Probe:
        return Probe(
            max(self.read_gb_s, other.read_gb_s),
            max(self.f32_gmac_s, other.f32_gmac_s),
            max(self.bf16_gmac_s, other.bf16_gmac_s),
            max(self.int8_gmac_s, other.int8_gmac_s),
        )


class Prober:
    """Compiles the probe once; `measure` may be called again and again, since shared machines change by the minute."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "probe.so"
            compiler = os.environ.get("CXX", "c++")
            flags = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread"]
            subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
            self._library = ctypes.CDLL(str(library))
        for name in ("read_bandwidth", "peak_f32", "peak_bf16", "peak_int8"):
            getattr(self._library, name).restype = ctypes.c_double

    def read_gb_s(self, megabytes: int = 256, rounds: int = 4) -> float:
        return float(self._library.read_bandwidth(self._num_threads, ctypes.c_size_t(megabytes << 20), rounds)) / 1e9

    def measure(self, rounds: int = 12) -> Probe:
        return Probe(
            self.read_gb_s(),
            max(float(self._library.peak_f32(self._num_threads)) for _ in range(rounds)) / 1e9,
            max(float(self._library.peak_bf16(self._num_threads)) for _ in range(rounds)) / 1e9,
            max(float(self._library.peak_int8(self._num_threads)) for _ in range(rounds)) / 1e9,
        )
