"""Logits of every family beyond Llama against transformers in float32, with texts longer than windows and blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.kernels.ops import Ops
from octavo.kernels.reference import ReferenceOps
from octavo.models.loader import load_model, open_model
from tests.models.running import batch_of, logits_of, new_pool
from tests.models.test_llama_logits import TOKEN_IDS, TOLERANCE, transformers_logits
from tests.models.tiny_families import FAMILIES, make_family


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_transformers(family: str, ops: Ops, tmp_path: Path) -> None:
    path = make_family(tmp_path / "model", family)
    expected = transformers_logits(path, TOKEN_IDS)
    model = load_model(open_model(path), ops, "f32")
    assert np.ptp(expected) > 1
    assert np.abs(logits_of(model, TOKEN_IDS) - expected).max() < TOLERANCE
    for chunks in [(7, 16, 31)] if isinstance(ops, ReferenceOps) else [(1,) * 40, (7, 16, 31)]:
        assert np.abs(logits_of(model, TOKEN_IDS, chunks) - expected).max() < TOLERANCE
        last = logits_of(model, TOKEN_IDS, chunks, every=False)
        assert np.abs(last[0] - expected[-1]).max() < TOLERANCE


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_chunks_or_rows(family: str, dtype: str, tmp_path: Path) -> None:
    """Law 1 at the model: whole, chunked, on other threads, and with fewer rows that become logits."""
    source = open_model(make_family(tmp_path / "model", family))
    model, single = (load_model(source, NativeOps(threads), dtype) for threads in (2, 1))
    kv_format = "f32" if dtype == "f32" else "bf16"
    whole = logits_of(model, TOKEN_IDS, kv_format=kv_format)
    assert np.array_equal(logits_of(single, TOKEN_IDS, kv_format=kv_format), whole)
    for chunks in [(1,) * 74, (7, 16, 31), (64,)]:
        assert np.array_equal(logits_of(model, TOKEN_IDS, chunks, kv_format), whole)
        assert np.array_equal(logits_of(model, TOKEN_IDS, chunks, kv_format, every=False), whole[-1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_several_sequences_in_one_step(family: str, tmp_path: Path) -> None:
    """Three sequences, some rows of which become logits, others not; bitwise what each gives alone."""
    model = load_model(open_model(make_family(tmp_path / "model", family)), NativeOps(2), "f32")
    texts = [TOKEN_IDS[:20], TOKEN_IDS[20:21], TOKEN_IDS[30:63]]
    batch = batch_of([(0, 20, [1, 2]), (0, 1, [3]), (0, 33, [4, 5, 6])], len(model.kv_groups("f32")))
    ids = np.array([token for text in texts for token in text], np.int32)
    found = model.forward(ids, batch, new_pool(model, 8), np.array([53, 0, 19, 20, 36], np.int32))
    alone = [logits_of(model, text) for text in texts]
    assert np.array_equal(found, np.stack([alone[2][32], alone[0][0], alone[0][19], alone[1][0], alone[2][15]]))
    none = model.forward(ids, batch, new_pool(model, 8), np.empty(0, np.int32))
    assert none.shape == (0, model.config.vocab_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_counted(family: str, tmp_path: Path) -> None:
    """What is said before loading is what is there after it."""
    source = open_model(make_family(tmp_path / "model", family))
    for dtype in ("f32", "bf16"):
        loaded = load_model(source, NativeOps(1), dtype).weights_bytes
        assert source.weights_bytes(dtype) <= loaded < 1.3 * source.weights_bytes(dtype)
