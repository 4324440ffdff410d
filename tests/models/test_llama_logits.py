"""Logits against transformers in float32: every family, every way to store it, whole and in chunks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32, Ops
from octavo.kernels.reference import ReferenceOps
from octavo.models.loader import load_model, open_model
from tests.models.running import batch_of, logits_of, new_pool
from tests.models.tiny_models import FAMILIES, make_tiny_model

TOLERANCE = 1e-3
TOKEN_IDS = [int(token) for token in np.random.default_rng(5).integers(3, 330, 75)]


def transformers_logits(path: Path, token_ids: list[int], **options: Any) -> F32:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", **options
    )
    with torch.no_grad():
        logits: F32 = model(torch.tensor([token_ids])).logits[0].numpy()
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_transformers(family: str, ops: Ops, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, family)
    expected = transformers_logits(path, TOKEN_IDS)
    model = load_model(open_model(path), ops, "f32")
    assert np.ptp(expected) > 1
    assert np.abs(logits_of(model, TOKEN_IDS) - expected).max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunks", [(1, 1, 1, 1, 1), (7, 16, 31), (64,)])
def test_chunks_equal_transformers(family: str, chunks: tuple[int, ...], ops: Ops, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, family)
    expected = transformers_logits(path, TOKEN_IDS)
    model = load_model(open_model(path), ops, "f32")
    assert np.abs(logits_of(model, TOKEN_IDS, chunks) - expected).max() < TOLERANCE
    last = logits_of(model, TOKEN_IDS, chunks, every=False)
    assert last.shape == (1, model.config.vocab_size)
    assert np.abs(last[0] - expected[-1]).max() < TOLERANCE


@pytest.mark.parametrize(
    ("family", "dtype", "num_shards"),
    [*itertools.product(("llama3", "qwen2"), ("f32", "f16", "bf16"), (1, 3)), ("qwen3", "bf16", 2)],
)
def test_every_way_to_store_equals_transformers(family: str, dtype: str, num_shards: int, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, family, dtype=dtype, num_shards=num_shards)
    source = open_model(path)
    assert source.config.dtype == dtype
    expected = transformers_logits(path, TOKEN_IDS)
    assert np.abs(logits_of(load_model(source, ReferenceOps(), "f32"), TOKEN_IDS) - expected).max() < TOLERANCE


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama2", "mistral", "qwen2", "qwen3"])
def test_tied_and_untied_heads(family: str, tied: bool, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, family, tie_word_embeddings=tied)
    expected = transformers_logits(path, TOKEN_IDS)
    model = load_model(open_model(path), ReferenceOps(), "f32")
    assert np.abs(logits_of(model, TOKEN_IDS) - expected).max() < TOLERANCE


@pytest.mark.parametrize("family", ["llama3", "qwen3", "mistral"])
def test_a_directory_that_transformers_saved(family: str, tmp_path: Path) -> None:
    """Its config.json spells rope as rope_parameters, and leaves out what is the default."""
    import torch
    import transformers

    first = make_tiny_model(tmp_path / "first", family)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    assert "rope_parameters" in (tmp_path / "saved" / "config.json").read_text()
    assert open_model(tmp_path / "saved").config == open_model(first).config
    ours = load_model(open_model(tmp_path / "saved"), ReferenceOps(), "f32")
    assert np.abs(logits_of(ours, TOKEN_IDS) - transformers_logits(first, TOKEN_IDS)).max() < TOLERANCE


def test_rows_of_several_sequences_in_one_step(ops: Ops, tmp_path: Path) -> None:
    """Three sequences, some rows of which become logits, others not; each equals its own run alone."""
    model = load_model(open_model(make_tiny_model(tmp_path, "qwen3")), ops, "f32")
    texts = [TOKEN_IDS[:20], TOKEN_IDS[20:21], TOKEN_IDS[30:63]]
    layers = new_pool(model, 8)
    batch = batch_of([(0, 20, [1, 2]), (0, 1, [3]), (0, 33, [4, 5, 6])])
    ids = np.array([token for text in texts for token in text], np.int32)
    rows = np.array([53, 0, 19, 20, 36], np.int32)
    found = model.forward(ids, batch, layers, rows)
    alone = [logits_of(model, text) for text in texts]
    expected = np.stack([alone[2][32], alone[0][0], alone[0][19], alone[1][0], alone[2][15]])
    assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_bits_do_not_depend_on_chunks_or_rows(family: str, dtype: str, tmp_path: Path) -> None:
    """Law 1 at the model: whole, chunked, and with fewer rows that become logits, bitwise the same."""
    model = load_model(open_model(make_tiny_model(tmp_path, family)), NativeOps(2), dtype)
    whole = logits_of(model, TOKEN_IDS, kv_format=dtype)
    for chunks in [(1,) * 74, (7, 16, 31), (64,)]:
        assert np.array_equal(logits_of(model, TOKEN_IDS, chunks, dtype), whole)
        assert np.array_equal(logits_of(model, TOKEN_IDS, chunks, dtype, every=False), whole[-1:])


def test_no_logits_still_writes_the_cache(ops: Ops, tmp_path: Path) -> None:
    model = load_model(open_model(make_tiny_model(tmp_path, "llama2")), ops, "f32")
    layers = new_pool(model, 3)
    ids = np.array(TOKEN_IDS[:24], np.int32)
    none = model.forward(ids[:20], batch_of([(0, 20, [1, 2])]), layers, np.empty(0, np.int32))
    assert none.shape == (0, model.config.vocab_size)
    found = model.forward(ids[20:], batch_of([(20, 4, [1, 2])]), layers, np.array([3], np.int32))
    assert np.abs(found[0] - logits_of(model, TOKEN_IDS[:24])[-1]).max() < 1e-4


def test_logits_stay_when_the_next_step_runs(tmp_path: Path) -> None:
    """The caller may keep what forward returned, and sees the same numbers later."""
    model = load_model(open_model(make_tiny_model(tmp_path, "llama2")), ReferenceOps(), "f32")
    first = logits_of(model, TOKEN_IDS[:10])
    kept = first.copy()
    logits_of(model, TOKEN_IDS[10:30])
    np.testing.assert_array_equal(first, kept)


def test_bf16_weights_and_cache_stay_near(ops: Ops, tmp_path: Path) -> None:
    source = open_model(make_tiny_model(tmp_path, "llama3"))
    exact = logits_of(load_model(source, ReferenceOps(), "f32"), TOKEN_IDS)
    rounded = logits_of(load_model(source, ops, "bf16"), TOKEN_IDS, kv_format="bf16")
    error = np.abs(rounded - exact).max()
    assert 1e-4 < error < 0.15
