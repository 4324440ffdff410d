"""Looks at the installation and the machine and says what is wrong with them, each problem with its cure.

It measures nothing that depends on a model, and prints nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from octavo.cli import environment
from octavo.cli.machine_probe import linear_speed, processor_name, read_bandwidth
from octavo.cli.units import format_bytes
from octavo.cli.versions import NOT_INSTALLED, octavo_version, package_version
from octavo.errors import KernelError, OctavoError
from octavo.executor.memory import available_memory_bytes, usable_cores

PACKAGES = (
    "numpy",
    "tokenizers",
    "safetensors",
    "gguf",
    "jinja2",
    "click",
    "rich",
    "msgspec",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "prometheus-client",
    "huggingface-hub",
)
OLDEST_PYTHON = (3, 11)
LOW_MEMORY_BYTES = 1 << 30
LOW_DISK_BYTES = 1 << 30
PROBED_DTYPES = ("bf16", "f32")


@dataclass(frozen=True, slots=True)
class Problem:
    """`fatal`: octavo cannot run a model like this."""

    fatal: bool
    what: str
    cure: str


@dataclass(frozen=True, slots=True)
class Health:
    """`instruction_set`, `linear_flops_per_s` are None where the kernels cannot be loaded or were not measured."""

    octavo: str
    python: str
    processor: str
    instruction_sets: tuple[str, ...]
    instruction_set: str | None
    cores: int
    threads: int
    memory_available_bytes: int
    read_bytes_per_s: float | None
    linear_flops_per_s: dict[str, float]
    compiler: str | None
    cache_dir: str
    packages: dict[str, str]
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Kernels:
    instruction_sets: tuple[str, ...] = ()
    flops_per_s: tuple[tuple[str, float], ...] = ()
    problems: tuple[Problem, ...] = ()


def examine(cache_dir: Path, *, measure: bool) -> Health:
    """Everything there is to say. `measure` False leaves out what takes time."""
    cores, available_bytes = usable_cores(), available_memory_bytes()
    kernels = examine_kernels(cores, measure=measure)
    packages = {name: package_version(name) for name in PACKAGES}
    compiler = environment.compiler()
    return Health(
        octavo=octavo_version(),
        python=sys.version.split()[0],
        processor=processor_name(),
        instruction_sets=kernels.instruction_sets,
        instruction_set=kernels.instruction_sets[0] if kernels.instruction_sets else None,
        cores=cores,
        threads=cores,
        memory_available_bytes=available_bytes,
        read_bytes_per_s=read_bandwidth(cores, available_bytes)
        if measure and packages["numpy"] != NOT_INSTALLED
        else None,
        linear_flops_per_s=dict(kernels.flops_per_s),
        compiler=compiler,
        cache_dir=str(cache_dir),
        packages=packages,
        problems=(
            *kernels.problems,
            *python_problems(sys.version_info[:2]),
            *package_problems(packages),
            *memory_problems(available_bytes),
            *cache_dir_problems(cache_dir),
            *compiler_problems(compiler, has_kernels=bool(kernels.instruction_sets)),
        ),
    )


def examine_kernels(threads: int, *, measure: bool) -> Kernels:
    """Which instruction sets the kernels have here, and how fast a linear layer runs with the best."""
    try:
        from octavo.kernels.native import supported_instruction_sets

        found = tuple(supported_instruction_sets())
    except KernelError as error:
        what, _, cure = str(error).rpartition("; ")
        return Kernels(problems=(Problem(True, what, cure),))
    except ModuleNotFoundError as error:
        return Kernels(problems=(Problem(True, f"the kernels need a package ({error})", "run `pip install .` again"),))
    problems, speeds = [], []
    if found[0] == "portable":
        problems.append(
            Problem(
                False, "only the portable kernels run here: answers are the same but slow", "use a machine with AVX2"
            )
        )
    for dtype in PROBED_DTYPES if measure else ():
        try:
            speeds.append((dtype, linear_speed(threads, "auto", dtype)))
        except OctavoError as error:
            what, _, cure = str(error).rpartition("; ")
            problems.append(Problem(True, what, cure))
    return Kernels(found, tuple(speeds), tuple(problems))


def python_problems(version: tuple[int, ...]) -> tuple[Problem, ...]:
    if version >= OLDEST_PYTHON:
        return ()
    return (Problem(True, f"Python {version[0]}.{version[1]} is too old", "install Python 3.11 or newer"),)


def package_problems(packages: dict[str, str]) -> tuple[Problem, ...]:
    missing = [name for name, version in packages.items() if version == NOT_INSTALLED]
    if not missing:
        return ()
    return (Problem(True, f"not installed: {', '.join(missing)}", f"run `pip install {' '.join(missing)}`"),)


def memory_problems(available_bytes: int) -> tuple[Problem, ...]:
    if available_bytes >= LOW_MEMORY_BYTES:
        return ()
    return (
        Problem(
            False,
            f"only {format_bytes(available_bytes)} of memory are available",
            "end other programs, or raise the memory limit of the container",
        ),
    )


def cache_dir_problems(cache_dir: Path) -> tuple[Problem, ...]:
    """The nearest folder that exists must take new files, and have room for a model."""
    nearest = cache_dir
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        return (
            Problem(False, f"models cannot be kept in {cache_dir}", "set OCTAVO_CACHE to a folder that can be written"),
        )
    free_bytes = shutil.disk_usage(nearest).free
    if free_bytes < LOW_DISK_BYTES:
        what = f"only {format_bytes(free_bytes)} are free for models in {cache_dir}"
        return (Problem(False, what, "free some space, or set OCTAVO_CACHE to a folder on a larger disk"),)
    return ()


def compiler_problems(compiler: str | None, *, has_kernels: bool) -> tuple[Problem, ...]:
    if compiler or has_kernels:
        return ()
    return (
        Problem(
            True,
            "there is no C++ compiler to build the kernels with",
            "install g++ or clang, then run `pip install .` again",
        ),
    )
