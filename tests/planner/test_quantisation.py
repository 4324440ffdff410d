"""Bytes of weights by what a config says of its quantisation."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.planner.config_geometry import geometry_of
from octavo.planner.geometry import Geometry
from octavo.planner.quantisation import bytes_by_storage, weight_bytes

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}
ATTENTION, MLP, TABLE = 4 * 256 * 256, 3 * 256 * 512, 1000 * 256
VECTORS = 2 * 4 * 256 + 256


def geometry(quantised: dict[str, Any] | None, companion: dict[str, Any] | None = None) -> Geometry:
    extra = {} if quantised is None else {"quantization_config": quantised}
    return geometry_of({**CONFIG, **extra}, "m", companion=companion)


def test_without_any_all_is_in_the_models_dtype() -> None:
    plain = geometry(None)
    assert weight_bytes(plain) == 2 * plain.parameters
    assert weight_bytes(plain, "f32") == 4 * plain.parameters


@pytest.mark.parametrize(
    ("quantised", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 * (128 * 128 + 4) / (128 * 128)),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_algo": "NVFP4", "quant_method": "modelopt"}, 4.5),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4.125),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, 4.5),
        ({"quant_method": "gptq", "bits": 8}, 8),
    ],
)
def test_matrices_are_quantised_and_head_and_embedding_are_not(quantised: dict[str, Any], bits: float) -> None:
    expected = 4 * (ATTENTION + MLP) * bits / 8 + 2 * (2 * TABLE + VECTORS)
    assert weight_bytes(geometry(quantised)) == pytest.approx(expected, abs=64)


def test_layers_that_are_left_out() -> None:
    skipped = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn", "lm_head"]}
    found = bytes_by_storage(geometry(skipped))
    assert found["fp8"] == 3 * ATTENTION + 4 * MLP
    assert found["bf16"] == 2 * (ATTENTION + 2 * TABLE + VECTORS)


@pytest.mark.parametrize("pattern", ["re:.*self_attn.*", "*self_attn*", "model.layers.*.self_attn*"])
def test_patterns_of_several_kinds(pattern: str) -> None:
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}}
    quantised = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": [pattern, "lm_head"]}
    found = bytes_by_storage(geometry(quantised))
    assert found["int4-32"] == 4 * MLP * 18 // 32
    assert found["bf16"] == 2 * (4 * ATTENTION + 2 * TABLE + VECTORS)


def test_layers_that_are_named_one_by_one() -> None:
    named = {f"model.layers.{layer}.mlp.{name}": {"quant_algo": "FP8"} for layer in (0, 1) for name in ("up_proj",)}
    quantised = {"quant_algo": "MIXED_PRECISION", "quant_method": "modelopt", "quantized_layers": named}
    assert bytes_by_storage(geometry(quantised))["fp8"] == 2 * 256 * 512


def test_the_companion_goes_first() -> None:
    beside = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    found = geometry({"quant_method": "modelopt", "quant_algo": "NVFP4"}, beside)
    assert found.quantisation is not None
    assert (found.quantisation.scheme, found.quantisation.kv_format) == ("fp8", "fp8")
    alone = geometry(None, beside)
    assert weight_bytes(alone) == weight_bytes(geometry({"quant_method": "fp8"}))


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ({"num_bits": 8, "type": "float"}, "fp8"),
        ("FP8", "fp8"),
        (None, None),
        ({"num_bits": 4, "type": "int"}, None),
    ],
)
def test_the_caches_own_format(scheme: object, expected: str | None) -> None:
    found = geometry({"quant_algo": "FP8", "kv_cache_scheme": scheme}).quantisation
    assert found is not None
    assert found.kv_format == expected
