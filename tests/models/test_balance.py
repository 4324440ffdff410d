"""Norms of heads are balanced by powers of two: keys become alike in size, and no bit of an answer changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.kernels.native import NativeOps
from octavo.models import gemma, llama_weights, mixtral
from octavo.models.balance import balanced_norms
from octavo.models.loader import load_model, open_model
from tests.models.running import logits_of
from tests.models.tiny_families import make_family
from tests.models.tiny_models import make_tiny_model

F32 = np.float32
IDS = [(7 * index + index * index) % 300 for index in range(60)]


def norms(head_dim: int = 32, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple(rng.uniform(0.5, 2.0, head_dim).astype(F32) for _ in range(2))


def test_a_large_channel_of_k_is_shared_with_q_and_products_stay() -> None:
    q, k = norms()
    k[5] *= 40
    q[7], k[8] = 0.0, 0.0
    new_q, new_k = balanced_norms(q, k)
    assert new_q is not None
    assert new_k is not None
    assert (new_q.dtype, new_k.dtype) == (F32, F32)
    np.testing.assert_array_equal(new_q * new_k, q * k)  # bit for bit
    factors = new_q[k != 0][new_q[k != 0] != 0] / q[k != 0][q[k != 0] != 0]
    assert (np.log2(factors) == np.rint(np.log2(factors))).all()
    assert new_k[5] / new_q[5] < k[5] / q[5] / 8
    assert new_q[5] / q[5] == new_q[5 + 16] / q[5 + 16] == k[5] / new_k[5]  # what rope turns together


def test_what_is_alike_stays_and_what_is_no_number_is_left_alone() -> None:
    q, k = norms()
    for new, old in zip(balanced_norms(q, q * F32(9.0)), (q, q * F32(9.0)), strict=True):
        np.testing.assert_array_equal(new, old)
    assert balanced_norms(None, None) == (None, None)
    for broken in (np.nan, np.inf):
        spoiled = k.copy()
        spoiled[3] = broken
        assert balanced_norms(q, spoiled)[1] is spoiled
    assert balanced_norms(np.zeros(32, F32), k)[1] is k


def test_factors_have_a_bound() -> None:
    q, k = norms()
    q[3], k[3] = 1e-30, 1e18
    new_q, new_k = balanced_norms(q, k)
    assert np.isfinite(new_q).all()
    assert np.isfinite(new_k).all()


def make_unbalanced(path: Path, family: str) -> Path:
    """A model with norms of heads, one channel of which is large in k."""
    model = make_tiny_model(path, family) if family == "qwen3" else make_family(path, family)
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("k_norm.weight")]:
        tensors[name][3] += 30
    save_file(tensors, file)
    return model


@pytest.mark.parametrize(("family", "module"), [("qwen3", llama_weights), ("gemma3", gemma), ("qwen3_moe", mixtral)])
@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
def test_no_bit_of_the_logits_changes_and_keys_are_alike(
    tmp_path: Path, family: str, module: object, kv_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, ops = open_model(make_unbalanced(tmp_path / family, family)), NativeOps(1)
    made = load_model(source, ops, "f32")
    monkeypatch.setattr(module, "balanced_norms", lambda q, k: (q, k))
    plain = load_model(source, ops, "f32")
    expected = logits_of(plain, IDS, kv_format=kv_format)
    np.testing.assert_array_equal(logits_of(made, IDS, kv_format=kv_format), expected)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_int8_keys_are_more_exact(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, ops = open_model(make_unbalanced(tmp_path / family, family)), NativeOps(1)
    made = load_model(source, ops, "f32")
    for module in (llama_weights, gemma):
        monkeypatch.setattr(module, "balanced_norms", lambda q, k: (q, k))
    plain = load_model(source, ops, "f32")
    expected = logits_of(plain, IDS)
    errors = [float(np.square(logits_of(one, IDS, kv_format="int8") - expected).mean()) for one in (made, plain)]
    assert errors[0] < errors[1] / 2, errors
