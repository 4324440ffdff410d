"""Blocks of a GGUF file reach the kernels as they are, whatever matrices they are joined into."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.kernels.ops import F32, U8
from octavo.kernels.reference import ReferenceLinear, ReferenceOps
from octavo.models.loader import open_model
from octavo.models.weights import ModelWeights, load_weights
from tests.models.tiny_gguf import make_tiny_gguf


class CountingOps(ReferenceOps):
    def __init__(self) -> None:
        self.num_kept = self.num_rounded = 0

    def pack_linear(self, weight: F32, bias: F32 | None, weights_dtype: str) -> ReferenceLinear:
        self.num_rounded += 1
        return super().pack_linear(weight, bias, weights_dtype)

    def pack_blocks(self, blocks: U8, bias: F32 | None, kind: str) -> ReferenceLinear:
        self.num_kept += 1
        return super().pack_blocks(blocks, bias, kind)


def matrices(weights: ModelWeights) -> list[ReferenceLinear]:
    found = [weights.embedding, weights.head]
    for layer in weights.layers:
        found += [layer.qkv, layer.output, layer.gate_up, layer.down]
    assert all(isinstance(one, ReferenceLinear) for one in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("architecture", ["llama2", "qwen2"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_values_and_biases_are_those_of_the_file(tmp_path: Path, architecture: str, kind: str) -> None:
    make_tiny_gguf(tmp_path / "tiny.gguf", architecture, kind)
    source = open_model(tmp_path / "tiny.gguf")
    exact = load_weights(source.weights, source.config, ReferenceOps(), "f32")
    ops = CountingOps()
    kept = load_weights(source.weights, source.config, ops, "int8")
    assert ops.num_kept > 0
    assert ops.num_rounded == 0
    for found, expected in zip(matrices(kept), matrices(exact), strict=True):
        np.testing.assert_array_equal(found.weight, expected.weight)
        assert (found.bias is None) == (expected.bias is None)
        if found.bias is not None and expected.bias is not None:
            np.testing.assert_array_equal(found.bias, expected.bias)


def test_four_bits_spare_the_vocabulary(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "tiny.gguf", "llama2", "BF16")
    source = open_model(tmp_path / "tiny.gguf")
    weights = load_weights(source.weights, source.config, ReferenceOps(), "int4")
    assert {weights.embedding.weights_dtype, weights.head.weights_dtype} == {"int8"}
    assert {layer.down.weights_dtype for layer in weights.layers} == {"int4"}
