"""Scales from a text: nothing that was seen is clipped, and no scale of those tried is better."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from octavo.certify.calibration import NUM_TRIED, CalibrationAsk, _balanced, _feedback, calibrate
from octavo.certify.text_digest import text_digest
from octavo.core.kv_spec import KVGroupSpec
from octavo.errors import ConfigError
from octavo.executor.one_text import OneText
from octavo.kernels.decoder_layer import run_layers
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import DecoderRows
from octavo.kv_formats.feedback import compensate
from octavo.kv_formats.hadamard import turn
from octavo.kv_formats.small_float import E4M3, E5M2
from octavo.models.loader import CausalLM, load_model, open_model
from tests.models.tiny_families import make_family
from tests.models.tiny_models import make_tiny_model

IDS = [(7 * index + index * index) % 300 for index in range(90)]


def tiny(folder: Path, family: str) -> CausalLM:
    return load_model(open_model(make_tiny_model(folder / family, family)), NativeOps(1), "f32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return tiny(tmp_path_factory.mktemp("tiny"), "llama3")


def ask(kv_format: str = "fp8_e4m3", scheme: str = "channel") -> CalibrationAsk:
    return CalibrationAsk(kv_format, scheme, "a" * 64, "1.2.3")


@pytest.mark.parametrize("scheme", ["head", "channel"])
@pytest.mark.parametrize(("kv_format", "form"), [("fp8_e4m3", E4M3), ("fp8_e5m2", E5M2)])
def test_nothing_seen_is_clipped_and_scales_are_no_larger_than_they_must_be(
    model: CausalLM, kv_format: str, form: object, scheme: str
) -> None:
    assert form in (E4M3, E5M2)
    largest = E4M3.largest if form is E4M3 else E5M2.largest
    found = calibrate(model, IDS, ask(kv_format, scheme))
    text = OneText(model, model.kv_groups("f32"), len(IDS))
    text.run(IDS, len(IDS) - 1)
    for index, (k_scales, v_scales) in enumerate(zip(found.k, found.v, strict=True)):
        for values, scales in zip(text.read(index, len(IDS)), (k_scales, v_scales), strict=True):
            most = np.abs(values).max(axis=1)
            if scheme == "head":
                assert (scales == scales[:, :1]).all()
                most = most.max(axis=1, keepdims=True)
            assert (most / scales <= largest).all()
            assert (scales < 2.01 * most / largest).all()
    assert (found.text_digest, found.num_tokens) == (text_digest(IDS), len(IDS))


def test_no_other_scale_that_is_tried_has_less_error(model: CausalLM) -> None:
    """Of every token, as the text is shorter than what is compared."""
    ids = IDS[:60]
    found = calibrate(model, ids, ask())
    text = OneText(model, model.kv_groups("f32"), len(ids))
    text.run(ids, len(ids) - 1)
    k = text.read(1, len(ids))[0]

    def error(scales: np.ndarray) -> np.ndarray:
        scale = scales[:, None]
        return np.square(E4M3.decode(E4M3.encode(k / scale)) * scale - k, dtype=np.float64).sum(axis=1)

    chosen, least = error(found.k[1]), np.abs(k).max(axis=1) / np.float32(448)
    for step in range(NUM_TRIED):
        assert (chosen <= error(least * np.float32(2 ** (step / NUM_TRIED))) * 1.01).all()


def test_a_text_in_pieces_has_the_largest_of_all(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.certify.calibration.TEXT_TOKENS", 40)
    pieces = [calibrate(model, IDS[start : start + 40], ask(scheme="head")) for start in range(0, 90, 40)]
    whole = calibrate(model, IDS, ask(scheme="head"))
    for layer in range(3):
        assert (whole.k[layer] >= np.max([one.k[layer] for one in pieces], axis=0) / 2).all()
        assert (2.01 * np.max([one.k[layer] for one in pieces], axis=0) >= whole.k[layer]).all()


def test_windows_are_calibrated_too(tmp_path: Path) -> None:
    assert len(calibrate(tiny(tmp_path, "mistral_window"), IDS, ask()).k) == 3


class _Latents:
    """Stands for a model of multi-head latent attention; nothing else of it is asked."""

    def kv_groups(self, kv_format: str) -> tuple[KVGroupSpec, ...]:
        return (KVGroupSpec("latent", (0,), 1, 80, kv_format, kind="latent"),)


def test_latents_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"keeps latents.*--kv-cache-scales none"):
        calibrate(cast(CausalLM, _Latents()), IDS, ask())


def test_what_cannot_be_had_is_refused(model: CausalLM) -> None:
    with pytest.raises(ConfigError, match="'k8v4'; it must be one of fp8_e4m3, fp8_e5m2, int8"):
        ask("k8v4")
    for scheme in ("head", "channel"):
        with pytest.raises(
            ConfigError, match="int8 has a scale for each token and head, and turned heads: take hadamard"
        ):
            ask("int8", scheme)
    with pytest.raises(ConfigError, match="'token'; it must be one of hadamard, head, channel"):
        ask(scheme="token")
    with pytest.raises(ConfigError, match="no tokens"):
        calibrate(model, [], ask())


def queries_of(folder: Path, ids: list[int]) -> list[np.ndarray]:
    """Of each layer [num_tokens, num_heads, head_dim], as attention gets them."""

    class Listening(NativeOps):
        def decoder_layers(self, layers: Any, kv_layers: Any, count: int, rows: DecoderRows) -> None:
            run_layers(self, layers, kv_layers, count, rows)

        def paged_attention(self, q: np.ndarray, *args: Any, **more: Any) -> None:
            found.append(q.copy())
            NativeOps.paged_attention(self, q, *args, **more)

    found: list[np.ndarray] = []
    model = load_model(open_model(folder), Listening(1), "f32")
    OneText(model, model.kv_groups("f32"), len(ids)).run(ids)
    return found


@pytest.mark.parametrize("kv_format", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss", "falcon_7b", "gpt2", "mixtral"])
def test_channels_of_k_and_of_q_are_balanced(tmp_path: Path, family: str, kv_format: str) -> None:
    """In every channel K and the queries have the same share of their mean square, after the scales."""
    folder = make_family(tmp_path / family, family)
    model = load_model(open_model(folder), NativeOps(1), "f32")
    found = calibrate(model, IDS, ask(kv_format, "hadamard"))
    text = OneText(model, model.kv_groups("f32"), len(IDS))
    expected = text.run(IDS)
    rounded = OneText(model, model.kv_groups(kv_format), len(IDS), found).run(IDS)
    assert np.abs(rounded - expected).mean() < 0.1 * np.abs(expected).mean()
    for index, queries in enumerate(queries_of(folder, IDS)):
        k, v = text.read(index, len(IDS))
        heads = queries.reshape(len(IDS), len(k), -1, k.shape[2])
        q = heads * found.k[index][:, None]
        stored = k / found.k[index][:, None]
        if family in ("gemma2", "gpt_oss"):
            assert found.k_means == (), "soft caps and sinks see them"
        else:
            np.testing.assert_allclose(found.k_means[index], k.mean(axis=1), atol=1e-5)
            stored = (k - found.k_means[index][:, None]) / found.k[index][:, None]
        of_k, of_q = np.square(stored).mean(axis=1), np.square(q).mean(axis=(0, 2))
        shares = [one / one.sum(axis=1, keepdims=True) for one in (of_k, of_q)]
        np.testing.assert_allclose(*shares, rtol=2e-3)
        if kv_format == "int8":
            assert (found.v[index] == 1).all()
            continue
        largest = E4M3.largest if kv_format == "fp8_e4m3" else E5M2.largest
        for values, scales in ((stored, np.ones_like(found.k[index])), (v / found.v[index][:, None], found.v[index])):
            assert (scales == scales[:, :1]).all()
            most = np.abs(turn(values)).max(axis=(1, 2))
            np.testing.assert_allclose(most, largest / 2, rtol=1e-3)


def test_feedback_makes_scores_more_exact_where_queries_are_alike() -> None:
    """Than rounding each number to the nearest, by the queries that it was made of, before scales and turn."""
    rng = np.random.default_rng(4)
    k, scales = rng.standard_normal((2, 50, 64)), np.exp(rng.standard_normal((2, 64))).astype(np.float32)
    queries = rng.standard_normal((2, 300, 4)) @ rng.standard_normal((2, 4, 64)) + 0.1 * rng.standard_normal(
        (2, 300, 64)
    )
    feedback = _feedback(queries.transpose(0, 2, 1) @ queries, scales)
    assert np.array_equal(feedback, np.triu(feedback, 1))
    stored = turn((k / scales[:, None]).astype(np.float32))
    nearest = E4M3.decode(E4M3.encode(stored))
    fed = np.stack([compensate(np.ascontiguousarray(stored[:, token]), feedback, E4M3) for token in range(50)], axis=1)
    errors = []
    for rounded in (nearest, fed):
        wrong = turn(rounded) * scales[:, None] - k
        errors.append(float(np.square(queries @ wrong.transpose(0, 2, 1)).mean()))
    assert errors[1] < errors[0] / 3


def test_floats_of_the_scheme_hadamard_have_feedback_and_int8_has_none(model: CausalLM) -> None:
    for kv_format, scheme in (("int8", "hadamard"), ("fp8_e4m3", "head"), ("fp8_e5m2", "channel")):
        assert calibrate(model, IDS, ask(kv_format, scheme)).k_feedback == ()
    found = calibrate(model, IDS, ask("fp8_e4m3", "hadamard"))
    assert [part.shape for part in found.k_feedback] == [(2, 16, 16)] * 3


def test_a_channel_without_queries_or_keys_has_a_scale_too(tmp_path: Path) -> None:
    nothing = np.zeros((2, 16))
    some = np.ones((2, 16))
    some[:, 3] = 0
    for k, q in ((nothing, nothing), (some, nothing), (nothing, some), (some, some)):
        scales = _balanced(k, q)
        assert (np.isfinite(scales) & (scales > 0)).all()
