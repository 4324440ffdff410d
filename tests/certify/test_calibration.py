"""Scales from a text: nothing that was seen is clipped, and no scale of those tried is better."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest

from octavo.certify.calibration import NUM_TRIED, CalibrationAsk, calibrate
from octavo.certify.text_digest import text_digest
from octavo.core.kv_spec import KVGroupSpec
from octavo.errors import ConfigError
from octavo.executor.one_text import OneText
from octavo.kernels.native import NativeOps
from octavo.kv_formats.small_float import E4M3, E5M2
from octavo.models.loader import CausalLM, load_model, open_model
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
    with pytest.raises(ConfigError, match="int8 has a scale for each head: take channel"):
        ask("int8", "head")
    with pytest.raises(ConfigError, match="'token'; it must be one of head, channel"):
        ask(scheme="token")
    with pytest.raises(ConfigError, match="no tokens"):
        calibrate(model, [], ask())


def test_int8_has_channels_of_k_alike_and_v_as_it_is(model: CausalLM) -> None:
    found = calibrate(model, IDS, ask("int8"))
    text = OneText(model, model.kv_groups("f32"), len(IDS))
    text.run(IDS, len(IDS) - 1)
    for index, (k_scales, v_scales) in enumerate(zip(found.k, found.v, strict=True)):
        assert np.array_equal(k_scales, np.abs(text.read(index, len(IDS))[0]).max(axis=1))
        assert (v_scales == 1).all()
