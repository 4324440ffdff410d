"""The int8 layers of aarch64, compiled for it and run in an emulator: the bits of this machine's.

It needs aarch64-linux-gnu-g++ and qemu-aarch64-static (Debian: g++-aarch64-linux-gnu and qemu-user-static).
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from octavo.kernels.native import NativeOps, supported_instruction_sets
from tests.kernels.test_grouped_linear import WHOLE, random_blocks

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
SOURCES = Path(__file__).parents[2] / "src/octavo/kernels/csrc"
FLAGS = ("-std=c++17", "-O1", "-static", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror")
LEVELS = {"portable": (), "neon_dot": ("-march=armv8.2-a+dotprod",)}
DTYPES = {"int8": 2, "int4": 3}

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"{COMPILER} and {EMULATOR} are not there"
    ),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, objects = tmp_path_factory.mktemp("aarch64"), []
    for level, flags in LEVELS.items():
        for op in ("linear", "grouped_linear"):
            objects.append(str(folder / f"{level}_{op}.o"))
            command = [COMPILER, *FLAGS, *flags, f"-DOCTAVO_ISA={level}", "-c", str(SOURCES / f"{op}.cpp")]
            subprocess.run([*command, "-o", objects[-1]], check=True)
    sources = [str(SOURCES / "pack_groups.cpp"), str(SOURCES / "thread_pool.cpp")]
    made = folder / "aarch64_linear"
    main = str(Path(__file__).with_name("aarch64_linear.cpp"))
    subprocess.run(
        [COMPILER, *FLAGS, f"-I{SOURCES}", main, *sources, *objects, "-o", str(made), "-lpthread"], check=True
    )
    return made


@pytest.mark.parametrize("rows", [1, 4, 7, 30])
@pytest.mark.parametrize("inputs", [32, 100, 576])
@pytest.mark.parametrize("weights_dtype", DTYPES)
def test_bits_are_those_of_this_machine(program: Path, weights_dtype: str, inputs: int, rows: int) -> None:
    random, outputs = np.random.default_rng(rows * inputs), 40
    weight, x = (random.standard_normal((count, inputs), np.float32) for count in (outputs, rows))
    x[0, :3] = 90.0, -0.0, 1e-20  # an outlying group
    head = np.array([DTYPES[weights_dtype], outputs, inputs, rows], np.int32)
    done = subprocess.run(
        [EMULATOR, str(program)], input=head.tobytes() + weight.tobytes() + x.tobytes(), capture_output=True, check=True
    )
    found = np.frombuffer(done.stdout, np.float32).reshape(2, rows, outputs)
    assert found[0].tobytes() == found[1].tobytes(), "with and without dot products"
    names = supported_instruction_sets()
    assert platform.machine() != "x86_64" or len(names) > 1, "the emulator's host has fused multiply-adds"
    ops, expected = NativeOps(1, names[0]), np.empty((rows, outputs), np.float32)
    ops.linear(x, ops.pack_linear(weight, None, weights_dtype), expected)
    assert found[0].tobytes() == expected.tobytes()


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("inputs", [32, 576])
@pytest.mark.parametrize("form", ["q4_1", WHOLE])
def test_minima_give_the_bits_of_this_machine(program: Path, form: str, inputs: int, rows: int) -> None:
    outputs, x = 40, np.random.default_rng(rows).standard_normal((rows, inputs), np.float32)
    blocks = random_blocks(1, outputs, inputs, form)
    head = np.array([4, outputs, inputs, rows], np.int32)
    given = head.tobytes() + blocks.tobytes() + x.tobytes()
    done = subprocess.run([EMULATOR, str(program)], input=given, capture_output=True, check=True)
    found = np.frombuffer(done.stdout, np.float32).reshape(2, rows, outputs)
    ops, expected = NativeOps(1, supported_instruction_sets()[0]), np.empty((rows, outputs), np.float32)
    ops.linear(x, ops.pack_blocks(blocks, None, "q4_1"), expected)
    for each in found:
        assert each.tobytes() == expected.tobytes()
