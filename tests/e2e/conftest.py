"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """Engines stand in cycles with what drives them; weights and pools would pile up until a later collection."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def gemma3_reference(gemma3_path: Path) -> PreTrainedModel:
    """transformers' model of the same file, dequantised to f32."""
    return dequantised(gemma3_path)


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_path: Path) -> PreTrainedModel:
    """transformers' model of the same file, dequantised to f32."""
    return dequantised(smollm2_path)


def dequantised(path: Path) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    torch.set_num_threads(1)  # threads that spin for each other stand still on a machine with busy neighbours
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    return model.eval()
