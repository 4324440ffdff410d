"""ExecutorConfig refuses what cannot be had, naming value, range and cure; `auto` follows the model."""

from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.executor.config import ExecutorConfig, resolve_kv_format
from octavo.models.packed_size import resolve_weights_dtype


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"weights_dtype": "f16"}, ("'f16'", "auto", "f32", "bf16")),
        ({"kv_cache_dtype": "int3"}, ("'int3'", "auto", "f32", "bf16")),
        ({"kv_cache_memory": 0}, ("0", "at least 1")),
        ({"block_size": 8}, ("8", "multiple of 16")),
        ({"block_size": 24}, ("24", "multiple of 16")),
        ({"block_size": 272}, ("272", "256")),
        ({"block_size": 0}, ("0", "16")),
        ({"threads": -1}, ("-1", "0 for one per core")),
        ({"threads": 5000}, ("5000", "1024")),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_had_is_refused(fields: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        ExecutorConfig(**fields)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("model_dtype", "weights", "kv"),
    [
        ("f32", "f32", "f32"),
        ("bf16", "bf16", "bf16"),
        ("f16", "bf16", "f16"),
        ("q4_1", "int8", "bf16"),
        ("q4_k", "bf16", "bf16"),
    ],
)
def test_auto_follows_the_model(model_dtype: str, weights: str, kv: str) -> None:
    assert resolve_weights_dtype("auto", model_dtype) == weights
    assert resolve_kv_format("auto", model_dtype) == kv
    assert resolve_weights_dtype("f32", model_dtype) == "f32"
    assert resolve_kv_format("bf16", model_dtype) == "bf16"
