"""GGUF files of the families beyond Llama: the logits of the directory that they were made from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.errors import ModelError
from octavo.kernels.native import NativeOps
from octavo.kernels.reference import ReferenceOps
from octavo.models.loader import load_model, open_model
from tests.models.family_gguf import make_family_gguf
from tests.models.running import logits_of
from tests.models.test_llama_logits import TOKEN_IDS, TOLERANCE, transformers_logits
from tests.models.tiny_families import make_family

# What GGUF files do not say: the scale of Gemma's scores follows head_dim, gpt-oss bends at 7.
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
CHANGES = {
    "deepseek_v2": {"rope_parameters": {**_YARN, "mscale": 0.9, "mscale_all_dim": 0.9}},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "gpt_oss": {"swiglu_limit": 7.0},
}
FAMILIES = (
    "gemma",
    "gemma2",
    "gemma3",
    "gpt2",
    "bigcode",
    "falcon_7b",
    "falcon_40b",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture(family: str, tmp_path: Path) -> None:
    directory = make_family(tmp_path / "model", family, **CHANGES.get(family, {}))
    make_family_gguf(tmp_path / "tiny.gguf", directory)
    model = load_model(open_model(tmp_path / "tiny.gguf"), NativeOps(2), "f32")
    assert np.abs(logits_of(model, TOKEN_IDS, (9, 20)) - transformers_logits(directory, TOKEN_IDS)).max() < TOLERANCE


@pytest.mark.parametrize("family", ["gemma3", "bigcode", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("quantisation", ["Q8_0", "Q4_0"])
def test_blocks_of_experts_are_kept_as_they_are(family: str, quantisation: str, tmp_path: Path) -> None:
    """Blocks that int8 holds reach the kernels without a second rounding, also those of one expert of a stack."""
    make_family_gguf(tmp_path / "tiny.gguf", make_family(tmp_path / "model", family), quantisation)
    source = open_model(tmp_path / "tiny.gguf")
    assert source.config.dtype == quantisation.lower()
    exact = logits_of(load_model(source, ReferenceOps(), "f32"), TOKEN_IDS)
    kept = logits_of(load_model(source, NativeOps(2), "int8"), TOKEN_IDS)
    assert (
        1e-4 < np.sqrt(np.square(kept - exact).mean()) < 0.2 * exact.std()
    )  # activations are rounded, weights are not


@pytest.mark.parametrize("family", ["deepseek_v2_lite", "deepseek_v3"])
def test_latents_of_older_files(family: str, tmp_path: Path) -> None:
    """Where the matrices of K and V are one."""
    directory = make_family(tmp_path / "model", family)
    make_family_gguf(tmp_path / "old.gguf", directory, splits_latent=False)
    make_family_gguf(tmp_path / "new.gguf", directory)
    old, new = (load_model(open_model(tmp_path / name), NativeOps(2), "f32") for name in ("old.gguf", "new.gguf"))
    assert np.array_equal(logits_of(old, TOKEN_IDS), logits_of(new, TOKEN_IDS))


def test_mxfp4(tmp_path: Path) -> None:
    """The blocks that gpt-oss is published in are dequantised."""
    directory = make_family(tmp_path / "model", "gpt_oss")
    make_family_gguf(tmp_path / "tiny.gguf", directory, "MXFP4")
    source = open_model(tmp_path / "tiny.gguf")
    assert source.config.dtype == "mxfp4"
    found = logits_of(load_model(source, ReferenceOps(), "f32"), TOKEN_IDS)
    assert np.corrcoef(found.ravel(), transformers_logits(directory, TOKEN_IDS).ravel())[0, 1] > 0.8


def test_a_config_that_contradicts_its_tensors_is_refused(tmp_path: Path) -> None:
    directory = make_family(tmp_path / "model", "gemma3")
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace('"num_hidden_layers": 6', '"num_hidden_layers": 5'))
    with pytest.raises(ModelError, match="layer_types names 6 layers and num_hidden_layers is 5"):
        open_model(directory)
    (directory / "config.json").write_text(config.replace('"intermediate_size": 96', '"intermediate_size": 97'))
    with pytest.raises(ModelError, match=r"has the shape \[64, 96\] where the model's config asks for \[64, 97\]"):
        open_model(directory)
