"""The thread pool: no data race, no lost or repeated piece, the same bits however many threads share the work."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from octavo.kernels.native import NativeOps, usable_cores

F32 = npt.NDArray[np.float32]

KERNELS = Path(__file__).parents[2] / "src" / "octavo" / "kernels" / "csrc"
STRESS = Path(__file__).with_name("thread_pool_stress.cpp")


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def test_no_data_race(tmp_path: Path) -> None:
    binary = tmp_path / "stress"
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{KERNELS}"]
    command = [os.environ.get("CXX", "c++"), *flags, str(STRESS), str(KERNELS / "thread_pool.cpp"), "-o", str(binary)]
    try:
        built = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no C++ compiler to build the race detector with")
    if built.returncode and "tsan" in built.stderr:
        pytest.skip("this compiler has no race detector (libtsan)")
    assert not built.returncode, built.stderr
    ran = subprocess.run([str(binary), "400"], capture_output=True, text=True, check=False, timeout=240)
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("the race detector does not run with this kernel's address randomisation")
    assert not ran.returncode, ran.stdout + ran.stderr[:4000]


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4, 2 * usable_cores() + 1])
@pytest.mark.parametrize("spin_pauses", [0, 200])
def test_the_same_bits_run_after_run(num_threads: int, spin_pauses: int) -> None:
    weight, x, gate_up = normal(1, 320, 192), normal(2, 40, 192), normal(3, 128, 640)
    alone = NativeOps(1)
    packed = alone.pack_linear(weight, None, "f32")
    expected, expected_activation = np.empty((40, 320), np.float32), np.empty((128, 320), np.float32)
    alone.linear(x, packed, expected)
    alone.silu_mul(gate_up, expected_activation)
    ops = NativeOps(num_threads, spin_pauses=spin_pauses)
    for run in range(150):
        rows = run % 40 + 1
        out, activation = np.empty((rows, 320), np.float32), np.empty((128, 320), np.float32)
        ops.linear(x[:rows], packed, out)
        ops.silu_mul(gate_up, activation)
        assert out.tobytes() == expected[:rows].tobytes()
        assert activation.tobytes() == expected_activation.tobytes()


@pytest.mark.parametrize("shared", [True, False], ids=["one pool", "a pool each"])
def test_callers_in_several_threads(shared: bool) -> None:
    weight, x = normal(1, 160, 128), normal(2, 16, 128)
    first = NativeOps(2)
    packed = first.pack_linear(weight, None, "f32")
    expected = np.empty((16, 160), np.float32)
    first.linear(x, packed, expected)
    wrong: list[int] = []

    def call(caller: int) -> None:
        ops = first if shared else NativeOps(2)
        for _ in range(100):
            out = np.empty((16, 160), np.float32)
            ops.linear(x, packed, out)
            if out.tobytes() != expected.tobytes():
                wrong.append(caller)

    callers = [threading.Thread(target=call, args=(caller,)) for caller in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
