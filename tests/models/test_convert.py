"""Models with pooled KV heads: the right rows, a directory that transformers reads alike, and clear refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from octavo.errors import ConfigError, ModelError
from octavo.kernels.reference import ReferenceOps
from octavo.models.convert import mean_heads, pool_kv_heads
from octavo.models.loader import load_model, open_model
from tests.models.running import logits_of
from tests.models.test_llama_logits import TOKEN_IDS, TOLERANCE, transformers_logits
from tests.models.tiny_families import make_family
from tests.models.tiny_gguf import make_tiny_gguf
from tests.models.tiny_models import F32, make_tiny_model, tiny_config, tiny_weights, write_shards


def ours(path: Path) -> F32:
    return logits_of(load_model(open_model(path), ReferenceOps(), "f32"), TOKEN_IDS)


@pytest.mark.parametrize("family", ["llama2", "llama3", "llama_bias", "qwen2", "qwen3", "mistral_window"])
def test_a_pooled_directory_is_what_transformers_reads(family: str, tmp_path: Path) -> None:
    source = open_model(make_tiny_model(tmp_path / "whole", family))
    (tmp_path / "pooled").mkdir()
    pooled = pool_kv_heads(source, 1, tmp_path / "pooled")
    assert pooled.config.num_kv_heads == open_model(tmp_path / "pooled").config.num_kv_heads == 1  # type: ignore[attr-defined]
    assert (tmp_path / "pooled" / "model.safetensors").stat().st_size >= pooled.num_bytes
    assert np.abs(ours(tmp_path / "pooled") - transformers_logits(tmp_path / "pooled", TOKEN_IDS)).max() < TOLERANCE
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "pooled"))
    for name, values in after.items():
        heads = before[name].shape[0] // 2
        same = before[name]
        if ".k_proj." in name or ".v_proj." in name:
            same = (before[name][:heads] + before[name][heads:]) / 2
        np.testing.assert_allclose(values, same, rtol=1e-6)


def test_heads_that_are_equal_lose_nothing(tmp_path: Path) -> None:
    """Four KV heads of which neighbours are twins: pooled to two, the model says the same."""
    config = tiny_config("llama_mha")
    weights = tiny_weights(config)
    for name in weights:
        if ".k_proj." in name or ".v_proj." in name:
            heads = weights[name].reshape(4, 16, -1)
            weights[name] = heads[[0, 0, 2, 2]].reshape(64, -1)
    whole = make_tiny_model(tmp_path / "whole", "llama_mha")
    write_shards(whole, weights, "f32", 1)
    (tmp_path / "pooled").mkdir()
    pool_kv_heads(open_model(whole), 2, tmp_path / "pooled")
    assert np.abs(ours(tmp_path / "pooled") - ours(whole)).max() < 1e-5


@pytest.mark.parametrize("family", ["llama2", "llama_linear_rope", "qwen3", "smollm2"])
def test_a_gguf_file_becomes_a_directory(family: str, tmp_path: Path) -> None:
    """Rows that GGUF interleaves come back in order; quantised weights are saved as bf16."""
    path = tmp_path / "tiny.gguf"
    make_tiny_gguf(path, family, "F32")
    (tmp_path / "pooled").mkdir()
    pool_kv_heads(open_model(path), 4, tmp_path / "pooled")
    assert np.abs(ours(tmp_path / "pooled") - transformers_logits(tmp_path / "pooled", TOKEN_IDS)).max() < TOLERANCE
    make_tiny_gguf(path, family, "Q8_0")
    (tmp_path / "bf16").mkdir()
    assert pool_kv_heads(open_model(path), 2, tmp_path / "bf16").dtype == "bf16"
    assert open_model(tmp_path / "bf16").config.dtype == "bf16"


def test_mean_heads() -> None:
    rows = np.arange(8, dtype=np.float32)[:, np.newaxis]
    assert mean_heads(rows, 4, 2)[:, 0].tolist() == [1, 2, 5, 6]
    assert mean_heads(rows, 4, 1)[:, 0].tolist() == [3, 4]


@pytest.mark.parametrize("wanted", [2, 3, 4, 100])
def test_impossible_numbers_of_heads(wanted: int, tmp_path: Path) -> None:
    source = open_model(make_tiny_model(tmp_path / "whole"))
    with pytest.raises(ConfigError, match=f"--kv-heads is {wanted} and the model has 2 KV heads; choose one of 1"):
        pool_kv_heads(source, wanted, tmp_path)


def test_a_model_with_one_head(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has no head to spare"):
        pool_kv_heads(open_model(make_tiny_model(tmp_path / "whole", "smollm2")), 1, tmp_path)


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match="KV heads of a GPT2LMHeadModel cannot be pooled; choose a model of one of Llama"
    ):
        pool_kv_heads(open_model(make_family(tmp_path / "whole", "gpt2")), 1, tmp_path)
    make_tiny_gguf(tmp_path / "tiny.gguf", "llama3", "F32")
    with pytest.raises(ModelError, match=r"rope_freqs\.weight.*give the model's directory"):
        pool_kv_heads(open_model(tmp_path / "tiny.gguf"), 1, tmp_path)


def test_a_folder_that_has_a_model(tmp_path: Path) -> None:
    whole = make_tiny_model(tmp_path / "whole")
    with pytest.raises(ModelError, match="cannot be written into"):
        pool_kv_heads(open_model(whole), 1, whole)
