"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_path: Path) -> PreTrainedModel:
    """transformers' model of the same file, dequantised to f32."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent,
        gguf_file=smollm2_path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    return model.eval()
