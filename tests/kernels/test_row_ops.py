"""Layer norm, activations, softmax, soft cap and rotation against float64, and row by row bitwise, everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from octavo.kernels.native import NativeOps, supported_instruction_sets
from octavo.kernels.ops import Ops, RopeTable
from octavo.kernels.reference import ReferenceOps

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Run = Callable[[Ops, F32], F32]

INSTRUCTION_SETS = supported_instruction_sets()
WIDTHS = [1, 15, 16, 17, 64, 65, 577]


@cache
def ops_for(instruction_set: str, num_threads: int = 2) -> NativeOps:
    return NativeOps(num_threads, instruction_set)


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def sigmoid(x: F64) -> F64:
    return 1 / (1 + np.exp(-x))


def gelu(x: F64) -> F64:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x: F64) -> F64:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def clamped_swiglu(gate: F64, up: F64) -> F64:
    gate, up = np.minimum(gate, 2.5), np.clip(up, -2.5, 2.5)
    return gate * sigmoid(1.702 * gate) * (up + 1)


ACTIVATIONS: dict[str, Callable[[F64], F64]] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "sigmoid": sigmoid,
}
GATES: dict[str, Callable[[F64, F64], F64]] = {
    "gelu": lambda gate, up: gelu(gate) * up,
    "gelu_tanh": lambda gate, up: gelu_tanh(gate) * up,
    "clamped_swiglu": clamped_swiglu,
    "silu": lambda gate, up: gate * sigmoid(gate) * up,
}


def layer_norm(ops: Ops, x: F32, *, has_bias: bool = True) -> F32:
    weight, bias, out = normal(2, x.shape[1]), normal(3, x.shape[1]), np.full_like(x, np.nan)
    ops.layer_norm(x, weight, bias if has_bias else None, 1e-5, out)
    return out


def activation(ops: Ops, x: F32, kind: str) -> F32:
    out = np.full_like(x, np.nan)
    ops.activation(x, kind, out)
    return out


def gated(ops: Ops, x: F32, kind: str) -> F32:
    out = np.full((len(x), x.shape[1] // 2), np.nan, np.float32)
    ops.gated_activation(x, kind, out, limit=2.5)
    return out


def softmax(ops: Ops, x: F32) -> F32:
    out = np.full_like(x, np.nan)
    ops.softmax(x, out)
    return out


def soft_cap(ops: Ops, x: F32) -> F32:
    out = np.full_like(x, np.nan)
    ops.soft_cap(x, 30.0, out)
    return out


def rotate(ops: Ops, x: F32) -> F32:
    """Rows of 2 heads of 40 dimensions, the last 16 of which turn."""
    angles = np.arange(300)[:, np.newaxis] * np.logspace(0, -3, 8)
    rope = RopeTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    heads = x[:, :80].copy().reshape(len(x), 2, 40)
    ops.rotate(heads, np.arange(7, 7 + len(x), dtype=np.int32), rope, 24)
    return heads.reshape(len(x), 80)


EVERY: dict[str, Run] = {
    "layer_norm": layer_norm,
    "layer_norm_without_bias": lambda ops, x: layer_norm(ops, x, has_bias=False),
    "softmax": softmax,
    "soft_cap": soft_cap,
    "rotate": rotate,
    **{kind: lambda ops, x, kind=kind: activation(ops, x, kind) for kind in ACTIVATIONS},  # type: ignore[misc]
    **{f"gated_{kind}": lambda ops, x, kind=kind: gated(ops, x, kind) for kind in GATES},  # type: ignore[misc]
}


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm_and_softmax(instruction_set: str, width: int) -> None:
    x, ops = normal(1, 9, width) * 3 + 1, ops_for(instruction_set)
    exact = x.astype(np.float64)
    centred = exact - exact.mean(axis=1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * normal(2, width)
    np.testing.assert_allclose(layer_norm(ops, x), normed + normal(3, width), atol=1e-5)
    np.testing.assert_allclose(layer_norm(ops, x, has_bias=False), normed, atol=1e-5)
    powers = np.exp(exact - exact.max(axis=1, keepdims=True))
    np.testing.assert_allclose(softmax(ops, x), powers / powers.sum(axis=1, keepdims=True), rtol=2e-6)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_number_by_number_over_the_whole_range(instruction_set: str) -> None:
    """Also far out, where powers overflow: finite, and right to about 1e-6 of what is large."""
    ops = ops_for(instruction_set)
    x = np.concatenate([np.linspace(-30, 30, 20001), [3e38, -3e38, 1e30, -1e30, 1e-30, 0.0, -0.0, 200, -200]])
    row = x.astype(np.float32)[np.newaxis]
    exact = row.astype(np.float64)
    with np.errstate(over="ignore"):
        for kind, meaning in ACTIVATIONS.items():
            np.testing.assert_allclose(activation(ops, row, kind), meaning(exact), rtol=1e-6, atol=2e-6, err_msg=kind)
        np.testing.assert_allclose(soft_cap(ops, row), 30 * np.tanh(exact / 30), rtol=2e-6, atol=1e-37)
        near = row[:, :20001]
        for name, gate in GATES.items():
            up = normal(5, 1, 20001) * 3
            found, expected = gated(ops, np.concatenate([near, up], axis=1), name), gate(near.astype(np.float64), up)
            np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", EVERY)
def test_as_the_reference(instruction_set: str, name: str) -> None:
    x = normal(4, 11, 90) * 2
    np.testing.assert_allclose(EVERY[name](ops_for(instruction_set), x), EVERY[name](ReferenceOps(), x), 1e-6, 1e-5)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", [name for name in EVERY if name != "rotate"])
def test_rows_do_not_depend_on_their_number_or_the_threads(instruction_set: str, name: str) -> None:
    run, x = EVERY[name], normal(1, 100, 578)
    alone = np.concatenate([run(ops_for(instruction_set, 1), x[i : i + 1]) for i in range(100)])
    for num_threads in (1, 2, 4):
        for rows in (2, 7, 64, 100):
            assert run(ops_for(instruction_set, num_threads), x[:rows]).tobytes() == alone[:rows].tobytes()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_rotation_depends_on_the_position_alone(instruction_set: str) -> None:
    x = normal(1, 280, 80)
    whole = rotate(ops_for(instruction_set), x)
    for num_threads in (1, 4):
        for rows in (1, 3, 64, 280):
            assert rotate(ops_for(instruction_set, num_threads), x[:rows]).tobytes() == whole[:rows].tobytes()
    assert (whole.reshape(-1, 2, 40)[..., :24] == x.reshape(-1, 2, 40)[..., :24]).all()
    assert np.abs(whole - x).max() > 1


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", EVERY)
def test_special_values_stay_in_their_row(instruction_set: str, name: str) -> None:
    ops, run, x = ops_for(instruction_set), EVERY[name], normal(2, 6, 90)
    clean = run(ops, x)
    x[2, 79] = np.nan
    others = np.arange(6) != 2
    out = run(ops, x)
    assert out[others].tobytes() == clean[others].tobytes()
    assert not np.isfinite(out[2]).all()


def test_what_cannot_be_is_refused() -> None:
    ops, x = ops_for(INSTRUCTION_SETS[0]), normal(1, 2, 16)
    rope = RopeTable(np.ones((4, 8), np.float32), np.ones((4, 8), np.float32))
    with pytest.raises(ValueError, match="'swish' is not one of relu"):
        ops.activation(x, "swish", x)
    with pytest.raises(ValueError, match="is not one of gelu, gelu_tanh, clamped_swiglu"):
        ops.gated_activation(x, "swish", np.empty((2, 8), np.float32))
    with pytest.raises(ValueError, match="must agree"):
        ops.softmax(x, np.empty((2, 15), np.float32))
    with pytest.raises(ValueError, match="cap be positive"):
        ops.soft_cap(x, 0.0, x)
    with pytest.raises(ValueError, match="outside the rope table"):
        ops.rotate(x.reshape(2, 1, 16), np.array([0, 4], np.int32), rope)
    with pytest.raises(ValueError, match="must lie inside a head"):
        ops.rotate(x.reshape(2, 1, 16), np.array([0, 3], np.int32), rope, 1)
