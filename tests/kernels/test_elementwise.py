"""RMS norm and the gated activation against float64, and row by row bitwise, on every instruction set here."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from octavo.kernels.native import NativeOps, supported_instruction_sets
from octavo.kernels.reference import ReferenceOps

F32 = npt.NDArray[np.float32]

INSTRUCTION_SETS = supported_instruction_sets()
WIDTHS = [1, 15, 16, 17, 63, 64, 65, 576, 1537]


@cache
def ops_for(instruction_set: str, num_threads: int = 2) -> NativeOps:
    return NativeOps(num_threads, instruction_set)


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rms_norm(ops: NativeOps, x: F32, weight: F32, eps: float = 1e-5) -> F32:
    out = np.full_like(x, np.nan)
    ops.rms_norm(x, weight, eps, out)
    return out


def silu_mul(ops: NativeOps, gate_up: F32) -> F32:
    out = np.full((len(gate_up), gate_up.shape[1] // 2), np.nan, np.float32)
    ops.silu_mul(gate_up, out)
    return out


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(instruction_set: str, width: int) -> None:
    x, weight = normal(1, 9, width) * 3, normal(2, width)
    exact = x.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    ops = ops_for(instruction_set)
    out = rms_norm(ops, x, weight)
    np.testing.assert_allclose(out, exact, rtol=1e-6)
    expected = np.empty_like(x)
    ReferenceOps().rms_norm(x, weight, 1e-5, expected)
    np.testing.assert_allclose(out, expected, rtol=2e-6)
    there = normal(3, *x.shape)
    added = there.copy()
    ops.rms_norm(x, weight, 1e-5, added, accumulate=True)
    assert added.tobytes() == (there + out).tobytes()
    ops.rms_norm(x, weight, 1e-5, x)  # in place
    assert x.tobytes() == out.tobytes()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_rms_norm_of_zeros_is_zero(instruction_set: str) -> None:
    assert (rms_norm(ops_for(instruction_set), np.zeros((2, 33), np.float32), normal(1, 33)) == 0).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul(instruction_set: str, width: int) -> None:
    gate_up = normal(1, 9, 2 * width) * 4
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    out = silu_mul(ops_for(instruction_set), gate_up)
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=1e-6)
    expected = np.empty((9, width), np.float32)
    ReferenceOps().silu_mul(gate_up, expected)
    np.testing.assert_allclose(out, expected, rtol=2e-6)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_silu_mul_over_the_whole_range(instruction_set: str) -> None:
    """No finite gate gives a NaN or an infinity; down to e^-87 the error is relative."""
    gate = np.concatenate([np.linspace(-200, 200, 40001), [3e38, -3e38, 1e-30, -1e-30, 0.0, -0.0, 88.72, -88.72]])
    gate = gate.astype(np.float32)
    out = silu_mul(ops_for(instruction_set), np.concatenate([gate, np.ones_like(gate)])[np.newaxis])[0]
    assert np.isfinite(out).all()
    exact = gate.astype(np.float64)
    exact = exact / (1 + np.exp(np.minimum(-exact, 700.0)))
    normal_range = gate > -87
    np.testing.assert_allclose(out[normal_range], exact[normal_range], rtol=1e-6)
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-5)
    assert (np.abs(out[gate < -90]) <= 1e-36).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("width", [17, 576])
def test_rows_do_not_depend_on_their_number_or_the_threads(instruction_set: str, width: int) -> None:
    x, weight, gate_up = normal(1, 200, width), normal(2, width), normal(3, 200, 2 * width)
    alone = ops_for(instruction_set, 1)
    norms = np.concatenate([rms_norm(alone, x[i : i + 1], weight) for i in range(200)])
    activations = np.concatenate([silu_mul(alone, gate_up[i : i + 1]) for i in range(200)])
    for num_threads in (1, 2, 4):
        ops = ops_for(instruction_set, num_threads)
        for rows in (2, 3, 7, 64, 100, 200):
            assert rms_norm(ops, x[:rows], weight).tobytes() == norms[:rows].tobytes()
            assert silu_mul(ops, gate_up[:rows]).tobytes() == activations[:rows].tobytes()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_special_values_stay_in_their_row(instruction_set: str, special: float) -> None:
    ops, weight, x, gate_up = ops_for(instruction_set), normal(1, 50), normal(2, 6, 50), normal(3, 6, 100)
    norms, activations = rms_norm(ops, x, weight), silu_mul(ops, gate_up)
    x[2, 49] = gate_up[2, 49] = special
    others = np.arange(6) != 2
    assert rms_norm(ops, x, weight)[others].tobytes() == norms[others].tobytes()
    out = silu_mul(ops, gate_up)
    assert out[others].tobytes() == activations[others].tobytes()
    assert not np.isfinite(out[2, 49])
