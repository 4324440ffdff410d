"""Norms of heads are balanced by powers of two: keys become alike in size, and no bit of an answer changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.core.kv_spec import KVSpec
from octavo.executor.kv_scales import KVScales, scales_by_weights
from octavo.executor.one_text import OneText
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import AttentionProjection
from octavo.kernels.reference import ReferenceOps
from octavo.models import gemma, llama_weights, mixtral
from octavo.models.balance import balanced_norms, key_scales
from octavo.models.config import RopeConfig
from octavo.models.loader import load_model, open_model
from octavo.models.rope import rope_tables
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


HEADS, KV_HEADS, DIM, HIDDEN = 4, 2, 32, 96
ROPE = rope_tables(RopeConfig(theta=10000.0), DIM, 4096)


def weights(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """q, k and v [(4 + 2 + 2) * 32, 96], whose channels have many sizes, and the norm before them."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.standard_normal((HEADS + 2 * KV_HEADS) * DIM) * 1.2)
    matrix = (rng.standard_normal((len(sizes), HIDDEN)) * sizes[:, None]).astype(F32)
    return matrix, rng.uniform(0.1, 3.0, HIDDEN).astype(F32)


def projection_of(matrix: np.ndarray, norm: np.ndarray, ops: NativeOps | ReferenceOps) -> AttentionProjection:
    q_norm, k_norm = norms(DIM, seed=3)
    return AttentionProjection(norm, 1e-6, ops.pack_linear(matrix, None, "f32"), q_norm, k_norm)


def found(matrix: np.ndarray, norm: np.ndarray, ops: NativeOps | ReferenceOps | None = None) -> np.ndarray:
    ops = ReferenceOps() if ops is None else ops
    return key_scales(ops, projection_of(matrix, norm, ops), KV_HEADS, DIM, ROPE.upto(1024))


def test_scales_of_keys_are_those_of_any_inputs_after_rope() -> None:
    """The root of size of k / size of q, in each channel and KV head, by 20,000 normal inputs at all positions."""
    matrix, norm = weights()
    made = np.random.default_rng(1).standard_normal((20_000, HIDDEN)) * norm @ matrix.T.astype(np.float64)
    heads = made.reshape(len(made), -1, DIM)[:, : HEADS + KV_HEADS]
    heads = heads / np.sqrt(np.square(heads).mean(axis=-1, keepdims=True))
    q_norm, k_norm = norms(DIM, seed=3)
    heads *= np.concatenate([np.tile(q_norm, (HEADS, 1)), np.tile(k_norm, (KV_HEADS, 1))])
    table, rows = ROPE.upto(1024), np.arange(len(made)) % 1024
    cos, sin = table.cos[rows, None], table.sin[rows, None]
    first, second = heads[..., : DIM // 2], heads[..., DIM // 2 :]
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    squares = np.square(turned).mean(axis=0)
    squares += 0.01 * squares.mean(axis=1, keepdims=True)
    q = squares[:HEADS].reshape(KV_HEADS, -1, DIM).mean(axis=1)
    expected = np.log2(squares[HEADS:] / q) / 4
    expected -= expected.mean(axis=1, keepdims=True)
    powers = np.log2(found(matrix, norm))
    np.testing.assert_allclose(powers, expected, atol=0.3)
    assert np.sqrt(np.square(powers - expected).mean()) < 0.09 < expected.std() / 5
    assert not np.allclose(powers[0], powers[1])  # each KV head has its own
    np.testing.assert_allclose(powers * 16, np.rint(powers * 16), atol=1e-4)


def test_scales_are_the_same_for_every_kernel_and_number_of_threads() -> None:
    matrix, norm = weights()
    expected = found(matrix, norm)
    assert expected.dtype == F32
    for threads in (1, 2):
        np.testing.assert_array_equal(found(matrix, norm, NativeOps(threads)), expected)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_weights_that_are_no_numbers_scale_nothing(broken: float) -> None:
    matrix, norm = weights()
    matrix[5 * DIM + 7, 3] = broken
    np.testing.assert_array_equal(found(matrix, norm), np.ones((KV_HEADS, DIM), F32))


def test_channels_and_heads_of_zeros_have_scales() -> None:
    matrix, norm = weights()
    matrix[HEADS * DIM : (HEADS + 1) * DIM] = 0  # all keys of the first KV head
    matrix[(HEADS + 1) * DIM + 4] = 0  # one channel of the second
    matrix[:DIM] = 0  # one query head
    scales = found(matrix, norm)
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    nothing = found(np.zeros_like(matrix), norm)
    np.testing.assert_array_equal(nothing, np.ones((KV_HEADS, DIM), F32))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_moe", "llama2"])
def test_int8_alone_has_them_where_heads_have_norms(tmp_path: Path, family: str) -> None:
    make = make_family if family in ("gemma3", "qwen3_moe") else make_tiny_model
    made = load_model(open_model(make(tmp_path / family, family)), NativeOps(1), "f32")
    for kv_format in ("f32", "bf16", "fp8_e4m3", "int8"):
        spec = KVSpec(made.kv_groups(kv_format), 16)
        scales = scales_by_weights(made, spec)
        if kv_format != "int8" or family == "llama2":
            assert scales is None, kv_format
            continue
        assert scales is not None
        assert [k.shape for k in scales.k] == [(made.config.num_kv_heads, made.config.head_dim)] * len(scales.k)
        assert all((v == 1).all() for v in scales.v)
        assert (scales.is_turned, scales.k_means, scales.k_feedback, scales.num_tokens) == (True, (), (), 0)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_keys_are_more_exact_with_them(tmp_path: Path, family: str) -> None:
    """What is large in k is small in q, by the matrices, which norms do not tell. In f32: codes alone are rounded."""
    path = (make_tiny_model if family == "qwen3" else make_family)(tmp_path / family, family)
    tensors = load_file(path / "model.safetensors")
    dim = load_model(open_model(path), NativeOps(1), "f32").config.head_dim
    sizes = np.exp(1.5 * np.random.default_rng(2).standard_normal(dim)).astype(F32)
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight"))]:
        of_rows = np.tile(sizes if "k_proj" in name else 1 / sizes, len(tensors[name]) // dim)
        tensors[name] *= of_rows[:, None]
    save_file(tensors, path / "model.safetensors")
    model = load_model(open_model(path), NativeOps(1, "portable"), "f32")
    groups = model.kv_groups("int8")
    own = scales_by_weights(model, KVSpec(groups, 16))
    assert own is not None
    ones = tuple(np.ones_like(k) for k in own.k)
    plain = KVScales("int8", "hadamard", ones, ones, (), (), "", "", 0, "")
    expected = OneText(model, model.kv_groups("f32"), len(IDS)).run(IDS)
    with_them, without = (OneText(model, groups, len(IDS), one).run(IDS) for one in (None, plain))
    errors = [float(np.square(logits - expected).mean()) for logits in (with_them, without)]
    assert errors[0] < errors[1] / 1.2, errors  # of which V, that nothing changes, has a part
    np.testing.assert_array_equal(OneText(model, groups, len(IDS), own).run(IDS), with_them)
