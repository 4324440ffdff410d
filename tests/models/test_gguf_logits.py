"""GGUF files of every quantisation, architecture and version against transformers with the dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from octavo.kernels.ops import F32
from octavo.kernels.reference import ReferenceOps
from octavo.models.loader import load_model, open_model
from tests.models.running import logits_of
from tests.models.test_llama_logits import TOKEN_IDS, TOLERANCE, transformers_logits
from tests.models.tiny_gguf import QUANTISATIONS, WIDE, make_tiny_gguf
from tests.models.tiny_models import tiny_config, write_shards


def gguf_logits(path: Path) -> F32:
    return logits_of(load_model(open_model(path), ReferenceOps(), "f32"), TOKEN_IDS, (9, 20))


def reference_logits(directory: Path, family: str, weights: dict[str, F32], **overrides: object) -> F32:
    """Of transformers, with the weights that a GGUF file stands for."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(tiny_config(family, **{**WIDE, **overrides})))
    write_shards(directory, weights, "f32", 1)
    return transformers_logits(directory, TOKEN_IDS)


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_every_quantisation(quantisation: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    weights = make_tiny_gguf(path, "llama2", quantisation)
    assert open_model(path).config.dtype == quantisation.lower()
    expected = reference_logits(tmp_path / "reference", "llama2", weights)
    assert np.ptp(expected) > 1
    assert np.abs(gguf_logits(path) - expected).max() < TOLERANCE


@pytest.mark.parametrize(
    "family", ["llama3", "llama_linear_rope", "smollm2", "mistral", "qwen2", "qwen3", "llama_bias"]
)
def test_every_architecture(family: str, tmp_path: Path) -> None:
    """Rows of q and k are interleaved in files of llama and mistral, and in no others; biases go with their rows."""
    path = tmp_path / "tiny.gguf"
    weights = make_tiny_gguf(path, family, "Q8_0")
    expected = reference_logits(tmp_path / "reference", family, weights)
    assert np.abs(gguf_logits(path) - expected).max() < TOLERANCE


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions(version: int, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    weights = make_tiny_gguf(path, "llama2", "Q4_0", version=version)
    assert path.read_bytes()[4] == version
    expected = reference_logits(tmp_path / "reference", "llama2", weights)
    assert np.abs(gguf_logits(path) - expected).max() < TOLERANCE


def test_the_rope_tensor_matters(tmp_path: Path) -> None:
    """Without rope_freqs the logits of the Llama 3 file are others: the test above is not blind to it."""
    scaled, plain = tmp_path / "scaled.gguf", tmp_path / "plain.gguf"
    make_tiny_gguf(scaled, "llama3", "F32")
    make_tiny_gguf(plain, "llama3", "F32", rope_scaling=None)
    assert np.abs(gguf_logits(scaled) - gguf_logits(plain)).max() > 0.01


def test_metadata_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    make_tiny_gguf(path, "llama2", "F16")
    source = open_model(path)
    assert source.tokenizer_source.directory is None
    metadata = source.tokenizer_source.gguf_metadata
    assert metadata is not None
    assert metadata["general.architecture"] == "llama"
    assert metadata["tokenizer.ggml.tokens"][1] == "<|im_start|>"
    assert metadata["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert all(type(merge) is str for merge in metadata["tokenizer.ggml.merges"])
    assert source.generation.eos_token_ids == (2, 0)
    assert source.generation.bos_token_id == 0
    assert source.generation.chat_template is not None
    assert "<|im_start|>" in source.generation.chat_template
