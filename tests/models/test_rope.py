"""Rope tables: the frequencies are transformers' to the bit, and a table that grows keeps what it had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.models.families import config_from_json
from octavo.models.rope import RopeTables, inverse_frequencies
from tests.models.tiny_models import tiny_config

SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0, 1000000.0])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_frequencies_are_those_of_transformers(scaling: dict[str, Any] | None, theta: float, head_dim: int) -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = tiny_config(
        "llama2", rope_scaling=scaling, rope_theta=theta, head_dim=head_dim, max_position_embeddings=16384
    )
    rotary = LlamaRotaryEmbedding(LlamaConfig(**fields))
    frequencies = inverse_frequencies(config_from_json(fields).rope, head_dim)
    np.testing.assert_allclose(frequencies, rotary.inv_freq.numpy(), rtol=1.2e-7)  # one unit in the last place
    table = RopeTables(frequencies, 4096).upto(4096)
    cos, sin = rotary(torch.zeros(1), torch.arange(4096)[None])
    np.testing.assert_allclose(table.cos, cos[0, :, : head_dim // 2].numpy(), atol=2e-4)
    np.testing.assert_allclose(table.sin, sin[0, :, : head_dim // 2].numpy(), atol=2e-4)


def test_growing_keeps_every_bit() -> None:
    frequencies = inverse_frequencies(config_from_json(tiny_config("llama3")).rope, 16)
    whole = RopeTables(frequencies, 40_000).upto(40_000)
    growing = RopeTables(frequencies, 40_000)
    for positions in (1, 4096, 4097, 9000, 20_001, 39_999, 40_000, 2):
        table = growing.upto(positions)
        assert len(table.cos) >= positions
        assert np.array_equal(table.cos, whole.cos[: len(table.cos)])
        assert np.array_equal(table.sin, whole.sin[: len(table.sin)])


def test_past_the_last_position_is_our_fault(tmp_path: Path) -> None:
    tables = RopeTables(inverse_frequencies(config_from_json(tiny_config("llama2")).rope, 16), 512)
    tables.upto(512)
    with pytest.raises(AssertionError, match="past the model's last one"):
        tables.upto(513)


def test_divisors_divide() -> None:
    rope = config_from_json(tiny_config("llama2")).rope
    plain = inverse_frequencies(rope, 16)
    divided = inverse_frequencies(rope, 16, np.full(8, 4.0, np.float32))
    np.testing.assert_array_equal(divided, plain / np.float32(4))
