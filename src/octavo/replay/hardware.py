"""A catalogue of machines: memory, bandwidth and arithmetic, each with where the figures stand.

Figures are the makers' peaks: of dense matrices in 16 bits with sums in 32 bits, and of memory. They are bounds, not
measurements; the efficiencies beside them say how much of them a step of a real engine reaches. It knows no model.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from octavo.errors import ConfigError

GB = 10**9  # as data sheets count; drivers show up to 7% more


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device. Efficiencies are shares of the peaks that a step reaches; 1 is the roofline itself."""

    name: str
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float  # 16-bit dense; a multiply-add counts as two
    source: str
    compute_efficiency: float = 0.75
    bandwidth_efficiency: float = 0.85
    attention_efficiency: float = 0.75  # of the bandwidth, when K and V are read
    layer_overhead_s: float = 10e-6  # norms, activations and starts of kernels, of one layer in one step
    step_overhead_s: float = 1e-3  # scheduling, sampling, copying results


def _of(name: str, gb: float, gb_s: float, tflops: float, source: str) -> Hardware:
    return Hardware(name, int(gb * GB), gb_s * GB, tflops * 1e12, source)


CATALOGUE: tuple[Hardware, ...] = (
    _of("A100-40GB", 40, 1555, 312, "NVIDIA A100 datasheet, SXM4 40 GB"),
    _of("A100-80GB", 80, 2039, 312, "NVIDIA A100 datasheet, SXM4 80 GB"),
    _of("A100-80GB-PCIe", 80, 1935, 312, "NVIDIA A100 datasheet, PCIe 80 GB"),
    _of("H100-80GB", 80, 3350, 989.4, "NVIDIA H100 datasheet, SXM5"),
    _of("H100-80GB-PCIe", 80, 2000, 756, "NVIDIA H100 datasheet, PCIe"),
    _of("H100-NVL-94GB", 94, 3900, 835, "NVIDIA H100 datasheet, NVL"),
    _of("H200-141GB", 141, 4800, 989.4, "NVIDIA H200 datasheet, SXM"),
    _of("B200-180GB", 180, 8000, 2250, "NVIDIA DGX B200 datasheet, one of eight"),
    _of("GH200-96GB", 96, 4000, 989.4, "NVIDIA GH200 datasheet, HBM3"),
    _of("L4-24GB", 24, 300, 121, "NVIDIA L4 datasheet (half of the figure with sparsity)"),
    _of("L40S-48GB", 48, 864, 362, "NVIDIA L40S datasheet (half of the figure with sparsity)"),
    _of("A10-24GB", 24, 600, 125, "NVIDIA A10 datasheet"),
    _of("A6000-48GB", 48, 768, 154.8, "NVIDIA RTX A6000 datasheet (half of the figure with sparsity)"),
    _of("T4-16GB", 16, 320, 65, "NVIDIA T4 datasheet"),
    _of("V100-16GB", 16, 900, 125, "NVIDIA V100 datasheet, SXM2"),
    _of("V100-32GB", 32, 900, 125, "NVIDIA V100 datasheet, SXM2 32 GB"),
    _of("RTX3090-24GB", 24, 936, 71, "NVIDIA GA102 whitepaper, sums in 32 bits"),
    # Efficiencies from per-layer times of vLLM kernels on this device with Llama-3.1-8B (LLMServingSim,
    # github.com/casys-kaist/LLMServingSim, profiler/perf/RTX4090, MIT): down projection 126.8 us for 1 token (0.92 of
    # the bandwidth), 141.6 us for 40 (0.82), 1459.6 us for 2,048 (0.998 of the arithmetic); attention of 32 requests
    # with 1,024 tokens each 181 us (0.73 of the bandwidth), 64 with 2,048 each 620 us (0.86); norms, activation and
    # rope about 15 us a layer; sampling 0.04 ms for 48 requests.
    replace(
        _of("RTX4090-24GB", 24, 1008, 165.2, "NVIDIA Ada whitepaper, sums in 32 bits"),
        compute_efficiency=0.98,
        bandwidth_efficiency=0.84,
        layer_overhead_s=15e-6,
        step_overhead_s=0.5e-3,
    ),
    _of("RTX5090-32GB", 32, 1792, 209.5, "NVIDIA RTX Blackwell whitepaper, sums in 32 bits"),
    _of("RTXPRO6000-96GB", 96, 1792, 503.8, "NVIDIA RTX PRO 6000 Blackwell data sheet, 2025"),
    _of("MI250X-128GB", 128, 3277, 383, "AMD Instinct MI250X datasheet"),
    _of("MI300X-192GB", 192, 5300, 1307.4, "AMD Instinct MI300X datasheet"),
    _of("MI325X-256GB", 256, 6000, 1307.4, "AMD Instinct MI325X datasheet"),
    _of("Gaudi2-96GB", 96, 2450, 432, "Intel Gaudi 2 white paper"),
    _of("Gaudi3-128GB", 128, 3700, 1835, "Intel Gaudi 3 white paper"),
    _of("TPUv4-32GB", 32, 1228, 275, "Google Cloud TPU documentation, v4"),
    _of("TPUv5e-16GB", 16, 819, 197, "Google Cloud TPU documentation, v5e"),
    _of("TPUv5p-95GB", 95, 2765, 459, "Google Cloud TPU documentation, v5p"),
    _of("TPUv6e-32GB", 32, 1640, 918, "Google Cloud TPU documentation, v6e"),
    _of("M2Ultra-192GB", 192, 800, 27.2, "Apple M2 Ultra specifications (32-bit arithmetic of its GPU)"),
    _of("M3Max-128GB", 128, 400, 14.2, "Apple M3 Max specifications (32-bit arithmetic of its GPU)"),
    _of("DDR4-2ch-32GB", 32, 51.2, 1.5, "two channels of DDR4-3200 at 25.6 GB/s; arithmetic of eight AVX2 cores"),
    _of("DDR5-2ch-64GB", 64, 89.6, 2.5, "two channels of DDR5-5600 at 44.8 GB/s; arithmetic of eight AVX2 cores"),
    _of("DDR5-8ch-512GB", 512, 307.2, 70, "eight channels of DDR5-4800 at 38.4 GB/s; 32 cores with AMX in bf16"),
    replace(
        _of(
            "CPU-2-CORES",
            16,
            20,
            0.25,
            "two cores with AVX-512: an order of magnitude; `octavo calibrate-cost` measures",
        ),
        compute_efficiency=0.6,
        step_overhead_s=0.3e-3,
    ),
)


def find_hardware(name: str) -> Hardware:
    """By name, letter case and dashes aside, with or without its memory; or by the beginning of one name only.

    `A100` alone is ambiguous, as there are two sizes of it, and is refused with the choices; `H100` is the one whose
    name has nothing but the memory behind it.
    """
    wanted = _plain(name)
    for of in (lambda one: one.name, _without_memory):
        found = [each for each in CATALOGUE if _plain(of(each)) == wanted]
        if len(found) == 1:
            return found[0]
    begins = [each for each in CATALOGUE if _plain(each.name).startswith(wanted)] if wanted else []
    if len(begins) == 1:
        return begins[0]
    names = [each.name for each in begins] or difflib.get_close_matches(name, [h.name for h in CATALOGUE], 3, 0.4)
    hint = f"; did you mean {', '.join(names)}" if names else ""
    raise ConfigError(
        f"--hardware {name!r} is not in the catalogue{hint}? `octavo plan --list-hardware` shows all of it"
    )


def _without_memory(one: Hardware) -> str:
    return one.name.removesuffix(f"-{one.memory_bytes // GB}GB")


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "").removeprefix("nvidia")
