"""The real SmolLM2-135M-Instruct against transformers, which dequantises the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.kernels.ops import Ops
from octavo.models.loader import load_model, open_model
from tests.models.running import logits_of

TOLERANCE = 1e-3
CHAT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 2, 198]
PROMPTS = [
    CHAT,
    [int(token) for token in np.random.default_rng(3).integers(0, 49152, 40)],
]


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> Any:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent,
        gguf_file=smollm2_path.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    )


def test_config(smollm2_path: Path) -> None:
    source = open_model(smollm2_path)
    config = source.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.dtype) == (49152, 8192, "q4_1")
    assert config.tie_word_embeddings
    assert source.generation.eos_token_ids == (2,)
    assert source.generation.chat_template is not None


def test_logits(smollm2_path: Path, reference: Any, ops: Ops) -> None:
    import torch

    model = load_model(open_model(smollm2_path), ops, "f32")
    for prompt in PROMPTS:
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0].numpy()
        found = logits_of(model, prompt, (5, 8))
        assert np.abs(found - expected).max() < TOLERANCE
        assert (found.argmax(1) == expected.argmax(1)).all()


def test_bf16_stays_near(smollm2_path: Path) -> None:
    """As served: weights and cache in bfloat16. The likely tokens stay likely."""
    source = open_model(smollm2_path)
    exact = logits_of(load_model(source, NativeOps(2), "f32"), CHAT)
    served = logits_of(load_model(source, NativeOps(2), "bf16"), CHAT, kv_format="bf16")
    centred = (served - served.mean(1, keepdims=True)) - (exact - exact.mean(1, keepdims=True))
    assert 1e-4 < np.sqrt(np.square(centred).mean()) < 0.15
    assert (served.argmax(1) == exact.argmax(1)).mean() > 0.8
