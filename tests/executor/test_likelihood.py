"""The mean negative log-likelihood of a text, against transformers' loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.executor.likelihood import nats_per_token
from octavo.kernels.native import NativeOps
from octavo.models.loader import load_model, open_model
from tests.models.tiny_families import make_family

TOKEN_IDS = [int(token) for token in np.random.default_rng(5).integers(3, 330, 300)]


@pytest.mark.parametrize("family", ["gemma3", "gpt2", "deepseek_v2"])
def test_as_transformers(family: str, tmp_path: Path) -> None:
    """Longer than one chunk, and than the windows."""
    import torch
    import transformers

    path = make_family(tmp_path / "model", family)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([TOKEN_IDS]), labels=torch.tensor([TOKEN_IDS])).loss.item()
    found = nats_per_token(load_model(open_model(path), NativeOps(2), "f32"), TOKEN_IDS)
    assert found == pytest.approx(expected, abs=1e-4)
