"""What is measured, chosen and left out, on a tiny model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.certify.certification import Ask, certify
from octavo.certify.limits import Limits
from octavo.certify.report import About, as_report, verdict, why
from octavo.errors import ConfigError, MemoryBudgetError
from octavo.kernels.native import NativeOps
from octavo.models.loader import CausalLM, load_model, open_model
from tests.certify.test_measure import LyingOps
from tests.models.tiny_models import make_tiny_model

IDS = [(7 * index + index * index) % 300 for index in range(200)]
ABOUT = About("a" * 64, "f32", "f32", "portable", "1.2.3", "2026-01-01T00:00:00+00:00")


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return NativeOps(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, ops: NativeOps) -> CausalLM:
    return load_model(open_model(make_tiny_model(tmp_path_factory.mktemp("tiny"))), ops, "f32")


@pytest.fixture
def ask() -> Ask:
    return Ask(
        token_ids=IDS,
        encode=lambda text: [3 + ord(letter) % 200 for letter in text],
        formats=("bf16", "int8", "k8v4", "fp8_e4m3"),
        limits=Limits(),
        max_model_len=150,
        scales={},
        clock=iter(range(10_000_000)).__next__,
    )


def test_the_smallest_that_is_certified_is_chosen_and_the_others_say_why_not(
    model: CausalLM, ops: NativeOps, ask: Ask
) -> None:
    said: list[str] = []
    found = certify(model, ops, ask, said.append)
    assert found.chosen is not None
    assert found.chosen.setting.name == "int8"
    assert [row.setting.name for row in found.rows] == ["bf16", "int8"]
    assert set(found.left_out) == {"k8v4", "fp8_e4m3"}
    assert "multiple of 32" in found.left_out["k8v4"]
    assert said[0] == "measuring f32, bf16, int8"
    report = as_report(found, ask, ABOUT, ops)
    assert report["reference"]["kl_mean"] == 0
    assert report["setting"]["kv_cache_dtype"] == "int8"
    assert verdict(report)[0].startswith("chosen: int8 (")
    assert sum(line.startswith("not certified: ") for line in verdict(report)) == 2


def test_where_nothing_below_bf16_holds_bf16_is_chosen_and_it_is_said(
    model: CausalLM, ops: NativeOps, ask: Ask
) -> None:
    first = certify(model, ops, replace(ask, formats=("bf16", "int8"), search_mixes=False))
    bf16, int8 = (row.paths["cold"].distance.kl_mean for row in first.rows)
    assert bf16 < int8
    limits = Limits(max_kl=max(bf16 * 2, 1e-8), min_top1=0.0)
    found = certify(model, ops, replace(ask, formats=("bf16", "int8"), limits=limits, search_mixes=False))
    assert found.chosen is not None
    assert found.chosen.setting.name == "bf16"
    lines = verdict(as_report(found, ask, ABOUT, ops))
    assert "nothing below bf16 is certified" in lines
    assert any(line.startswith("not certified: int8: KL is ") for line in lines)


def test_what_cannot_be_measured_is_refused(
    model: CausalLM, ops: NativeOps, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="has 20 tokens"):
        certify(model, ops, replace(ask, token_ids=IDS[:20]))
    with pytest.raises(ConfigError, match="a length of 202 needs a text of 201 tokens, and this one has 200"):
        certify(model, ops, replace(ask, max_model_len=202))
    monkeypatch.setattr("octavo.certify.certification.available_memory_bytes", lambda: 100_000)
    with pytest.raises(MemoryBudgetError, match=r"3 caches of the path \w+ need \d+ bytes, and 100000 are there"):
        certify(model, ops, ask)


def test_nothing_is_certified_where_paths_differ(tmp_path: Path, ops: NativeOps, ask: Ask) -> None:
    lying = LyingOps(ops)
    model = load_model(open_model(make_tiny_model(tmp_path)), lying, "f32")  # type: ignore[arg-type]
    found = certify(model, lying, replace(ask, formats=("bf16", "int8")))  # type: ignore[arg-type]
    assert found.chosen is None
    (of_reference,) = [line for line in why(found) if line.startswith("f32: ")]
    assert "chunked" in of_reference


def test_it_is_said_that_no_mixes_are_looked_for(tmp_path: Path, ops: NativeOps, ask: Ask) -> None:
    model = load_model(open_model(make_tiny_model(tmp_path, dtype="bf16")), ops, "bf16")
    said: list[str] = []
    found = certify(model, ops, replace(ask, formats=("int8",), limits=Limits(max_kl=1e-12)), said.append)
    assert found.chosen is None
    assert "no mixes are looked for: bf16, in which layers are left, is not measured or not certified" in said
