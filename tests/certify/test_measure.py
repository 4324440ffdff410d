"""Every path measures the same model: the reference is at no distance, and the same rows have the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from octavo.certify.calibration import CalibrationAsk, calibrate
from octavo.certify.divergence import Expected, Tally
from octavo.certify.measure import measure
from octavo.certify.paths import PATHS, PIECE_TOKENS, paths_of, step_tokens
from octavo.certify.probe import Probe
from octavo.certify.setting import Setting
from octavo.core.config import SchedulerConfig
from octavo.core.kv_bytes import FORMAT_BYTES
from octavo.errors import ConfigError
from octavo.executor.one_text import OneText
from octavo.kernels.decoder_layer import run_layers
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32, DecoderRows, Ops
from octavo.models.loader import CausalLM, load_model, open_model
from tests.models.tiny_models import make_tiny_model

IDS = [(7 * index + index * index) % 300 for index in range(1100)]


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return NativeOps(2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, ops: NativeOps) -> CausalLM:
    return load_model(open_model(make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama_wide_heads")), ops, "f32")


def test_every_format_on_every_path(model: CausalLM, ops: NativeOps) -> None:
    fp8 = [calibrate(model, IDS[:200], CalibrationAsk(one, "head", "", "")) for one in ("fp8_e4m3", "fp8_e5m2")]
    scales = {one.kv_format: one for one in fp8}
    settings = [Setting.of(model, name, scales.get(name)) for name in FORMAT_BYTES]
    settings.append(Setting.of(model, "k8v4", None, (0,)))
    assert settings[0].name == "f32"
    results = measure(model, ops, settings, paths_of(IDS, 400, model.config.vocab_size))
    for setting, paths in zip(settings, results, strict=True):
        assert tuple(paths) == PATHS
        for name, path in paths.items():
            assert path.is_same, f"{setting.name} on {name}"
            assert path.distance.kl_mean >= 0
            assert path.distance.kl_mean == 0 or setting.name != "f32"
        assert paths["cold"].distance.num_tokens == len(IDS)
        assert paths["long"].distance.num_tokens == 399
        assert paths["prefix_hit"].num_cached_tokens > 0
        assert paths["batched"].distance.kl_mean == pytest.approx(paths["cold"].distance.kl_mean), "the same pieces"
    by_name = {setting.name: paths["cold"].distance.kl_mean for setting, paths in zip(settings, results, strict=True)}
    assert by_name["bf16"] < by_name["int8"] < by_name["fp8_e4m3"] < by_name["fp8_e5m2"]
    assert by_name["k8v4 (f32 in layers 0)"] < by_name["k8v4"]


def test_the_divergence_is_that_of_the_whole_vocabulary(model: CausalLM, ops: NativeOps) -> None:
    """Against plain arithmetic in f64 on the logits of a text that ran alone."""
    ids = IDS[:300]
    setting = Setting.of(model, "int8")
    exact, coarse = (
        OneText(model, one.spec.groups, len(ids)).run(ids).astype(np.float64)
        for one in (Setting.of(model, "f32"), setting)
    )
    moved = [x - x.max(axis=1, keepdims=True) for x in (exact, coarse)]
    logs = [x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in moved]
    kl = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=1)
    nats = -logs[1][np.arange(299), ids[1:]]
    found = measure(model, ops, [Setting.of(model, "f32"), setting], paths_of(ids, 400, model.config.vocab_size))[1]
    distance = found["cold"].distance
    assert distance.kl_mean == pytest.approx(kl.mean(), rel=0.05, abs=1e-7)
    assert distance.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=0.1, abs=1e-6)
    assert distance.top1 == np.mean(exact.argmax(1) == coarse.argmax(1))
    assert distance.perplexity == pytest.approx(np.exp(nats.mean()), rel=1e-4)


class LyingOps:
    """Attention that is a little off where a step has fewer than some rows: what law 1 forbids."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)

    def decoder_layers(self, layers: Any, kv_layers: Any, count: int, rows: DecoderRows) -> None:
        run_layers(cast(Ops, self), layers, kv_layers, count, rows)

    def paged_attention(self, q: F32, batch: object, kv: object, scale: float, out: F32, **more: object) -> None:
        self._ops.paged_attention(q, batch, kv, scale, out, **more)  # type: ignore[arg-type]
        if len(q) < 60:
            out *= np.float32(1.0001)


def test_a_path_that_gives_other_bits_is_noticed(tmp_path: Path, ops: NativeOps) -> None:
    lying = LyingOps(ops)
    source = open_model(make_tiny_model(tmp_path))
    model = load_model(source, lying, "f32")  # type: ignore[arg-type]
    settings = [Setting.of(model, "f32"), Setting.of(model, "bf16")]
    found = measure(model, lying, settings, paths_of(IDS[:200], 200, model.config.vocab_size))  # type: ignore[arg-type]
    assert [paths["chunked"].is_same for paths in found] == [False, False]
    assert [paths["cold"].is_same for paths in found] == [True, True]


def test_paths_are_what_they_are_called() -> None:
    cold, prefix, batched, chunked, long = paths_of(IDS, 700, 1000)
    assert [len(texts[0].token_ids) for texts in cold.rounds] == [
        PIECE_TOKENS,
        PIECE_TOKENS,
        len(IDS) - 2 * PIECE_TOKENS,
    ]
    assert prefix.config.enable_prefix_caching
    assert not cold.config.enable_prefix_caching
    for (stranger,), (text,) in zip(prefix.rounds[::2], prefix.rounds[1::2], strict=True):
        hit = len(stranger.token_ids) - 1
        assert stranger.first_heard is None
        assert list(stranger.token_ids[:hit]) == list(text.token_ids[:hit])
        assert stranger.token_ids[hit] != text.token_ids[hit]
        assert text.first_heard == hit
        assert hit % 16, "inside a block"
    assert len(batched.rounds) == 1
    assert batched.config.max_num_seqs == len(batched.rounds[0]) == 3
    assert batched.config.max_num_batched_tokens < PIECE_TOKENS
    assert chunked.config.max_num_batched_tokens % 16
    assert len(long.rounds[0][0].token_ids) == 699
    assert long.num_tokens == 699


def test_steps_of_a_large_vocabulary_are_short() -> None:
    assert step_tokens(49_152) == 512
    assert step_tokens(262_144) * 262_144 * 4 <= 128 << 20
    assert step_tokens(1 << 24) == 64


def test_a_tally_of_parts_is_that_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    exact, coarse = rng.standard_normal((2, 40, 30)).astype(np.float32)
    targets = rng.integers(0, 30, 39).tolist()
    whole, parts = Tally(), Tally()
    whole.add(coarse.copy(), Expected.of(exact.copy()), targets)
    for start in (0, 25):
        stop = 25 if start == 0 else 40
        parts.add(coarse[start:stop].copy(), Expected.of(exact[start:stop].copy()), targets[start:stop])
    assert parts.distance() == whole.distance()
    assert whole.distance().num_tokens == 40


def test_a_probe_hears_from_the_position_on_that_was_asked_for(model: CausalLM, ops: NativeOps) -> None:
    setting = Setting.of(model, "f32")
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=7, max_model_len=60)
    probe = Probe(model, ops, setting.spec, config)
    probe.add("a", IDS[:20], 9)
    probe.add("b", IDS[5:35], None)
    heard = []
    while probe.has_work:
        heard += probe.step()
    assert {one.request_id for one in heard} == {"a"}
    positions = [one.first + index for one in heard for index in range(len(one.logits))]
    assert positions == list(range(9, 20))
    alone = OneText(model, setting.spec.groups, 20).run(IDS[:20], 9)
    assert np.concatenate([one.logits for one in heard]).tobytes() == alone.tobytes()


def test_a_format_that_cannot_hold_the_heads_is_refused(tmp_path: Path, ops: NativeOps) -> None:
    narrow = load_model(open_model(make_tiny_model(tmp_path)), ops, "f32")
    with pytest.raises(ConfigError, match="multiple of 32"):
        Setting.of(narrow, "k8v4")
    assert replace(Setting.of(narrow, "int8"), skip_layers=()).bytes_per_token == 3 * 2 * 2 * 18
