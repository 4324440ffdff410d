"""Machines as a roofline sees them: memory, bandwidth, arithmetic, and how much of these real kernels reach.

Peak figures are the makers' data sheets, dense 16-bit floats with 32-bit sums. Standard library only: data, no
arithmetic. It knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ConfigError

GB, TERA = 10**9, 10**12


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device. Efficiencies are shares of the peaks that a step reaches; 1 is the roofline itself."""

    name: str
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float
    source: str
    compute_efficiency: float = 0.75
    bandwidth_efficiency: float = 0.85
    attention_efficiency: float = 0.75  # of the bandwidth, when K and V are read
    layer_overhead_s: float = 10e-6  # norms, activations and starts of kernels, of one layer in one step
    step_overhead_s: float = 1e-3  # scheduling, sampling, copying results


_ALL = (
    Hardware("A100-40GB", 40 * GB, 1555e9, 312e12, "NVIDIA A100 data sheet, 2021 (40 GB PCIe and SXM)"),
    Hardware("A100-80GB", 80 * GB, 2039e9, 312e12, "NVIDIA A100 data sheet, 2021 (80 GB SXM)"),
    Hardware("H100", 80 * GB, 3350e9, 989e12, "NVIDIA H100 data sheet, 2023 (SXM)"),
    Hardware("H200", 141 * GB, 4800e9, 989e12, "NVIDIA H200 data sheet, 2024"),
    Hardware("B200", 180 * GB, 8000e9, 2250e12, "NVIDIA Blackwell data sheet, 2024 (SXM)"),
    Hardware("L40S", 48 * GB, 864e9, 362e12, "NVIDIA L40S data sheet, 2023"),
    Hardware("L4", 24 * GB, 300e9, 121e12, "NVIDIA L4 data sheet, 2023"),
    # Efficiencies from per-layer times of vLLM kernels on this device with Llama-3.1-8B (LLMServingSim,
    # github.com/casys-kaist/LLMServingSim, profiler/perf/RTX4090, MIT): down projection 126.8 us for 1 token (0.92 of
    # the bandwidth), 141.6 us for 40 (0.82), 1459.6 us for 2,048 (0.998 of the arithmetic); attention of 32 requests
    # with 1,024 tokens each 181 us (0.73 of the bandwidth), 64 with 2,048 each 620 us (0.86); norms, activation and
    # rope about 15 us a layer; sampling 0.04 ms for 48 requests.
    Hardware(
        "RTX4090",
        24 * GB,
        1008e9,
        165.2e12,
        "NVIDIA Ada GPU architecture, 2022",
        compute_efficiency=0.98,
        bandwidth_efficiency=0.84,
        attention_efficiency=0.75,
        layer_overhead_s=15e-6,
        step_overhead_s=0.5e-3,
    ),
    Hardware("RTXPRO6000", 96 * GB, 1792e9, 503.8e12, "NVIDIA RTX PRO 6000 Blackwell data sheet, 2025"),
    Hardware(
        "CPU-2-CORES",
        16 * GB,
        20e9,
        0.25e12,
        "two cores with AVX-512: an order of magnitude, to be replaced by `octavo calibrate-cost`",
        compute_efficiency=0.6,
        step_overhead_s=0.3e-3,
    ),
)
HARDWARE = {one.name.lower(): one for one in _ALL}


def hardware_named(name: str) -> Hardware:
    """A name may end in the memory: `H100` and `H100-80GB`. Raises ConfigError for one that is not in the catalogue."""
    asked = name.lower().replace(" ", "").replace("_", "-")
    found = HARDWARE.get(asked)
    if found is None:
        bare, _, memory = asked.rpartition("-")
        one = HARDWARE.get(bare)
        found = one if one is not None and memory == f"{one.memory_bytes // GB}gb" else None
    if found is None:
        raise ConfigError(f"--hardware is {name!r}; the catalogue has {', '.join(one.name for one in _ALL)}")
    return found
