"""The fingerprint of the kernels: the same for the same bits, another for others."""

from __future__ import annotations

import pytest

from octavo.executor.numerics import numerics
from octavo.kernels.native import NativeOps, supported_instruction_sets
from octavo.kernels.ops import F32, Ops


def test_it_names_dtype_and_formats_and_not_threads() -> None:
    one, four = NativeOps(1), NativeOps(4)
    asked = [(dtype, kv) for dtype in ("f32", "bf16", "int8", "int4") for kv in ("f32", "bf16", "int8", "fp8_e4m3")]
    found = {(dtype, kv): numerics(one, dtype, [kv]) for dtype, kv in asked}
    assert len(set(found.values())) == len(asked)
    assert all(numerics(four, dtype, [kv]) == digest for (dtype, kv), digest in found.items())
    assert numerics(one, "f32", ["int8", "bf16", "int8"]) == numerics(one, "f32", ["bf16", "int8"])


@pytest.mark.skipif("avx512_bf16" not in supported_instruction_sets(), reason="needs a processor that multiplies bf16")
def test_instruction_sets_that_round_otherwise_have_another() -> None:
    assert numerics(NativeOps(1, "avx512_bf16"), "bf16", ["bf16"]) != numerics(NativeOps(1, "avx2"), "bf16", ["bf16"])


class _Changed:
    """Kernels of which one gives the last bit otherwise."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)

    def paged_attention(self, q: F32, batch: object, kv: object, scale: float, out: F32) -> None:
        self._ops.paged_attention(q, batch, kv, scale, out)  # type: ignore[arg-type]
        out[-1, -1, -1] *= 1 + 2**-23


def test_one_other_bit_shows() -> None:
    ops = NativeOps(1)
    assert numerics(_Changed(ops), "f32", ["bf16"]) != numerics(ops, "f32", ["bf16"])  # type: ignore[arg-type]
