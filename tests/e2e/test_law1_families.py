"""Law 1 on tiny models with windows, sinks, experts and latents: cold, warm, chunked, batched, preempted, forked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from hypothesis import given, settings

from octavo.errors import ConfigError
from octavo.kernels.native import NativeOps, supported_instruction_sets
from octavo.models.loader import load_model, open_model
from tests.e2e import law1_cases as cases
from tests.e2e import law1_families as families
from tests.e2e.law1_engine import Engine, assert_same
from tests.e2e.test_law1_tiny import Cold, Shape, play, scripts, shapes
from tests.models.tiny_families import make_family

PROMPT = cases.other_ids(99, 100, 300)
FAMILIES = ("gemma3", "mistral_window", "gpt_oss", "mixtral", "deepseek_v2", "deepseek_v3", "gpt2", "falcon_7b")


def maker(
    path: Path, *, weights_dtype: str = "f32", kv_format: str = "bf16", threads: int = 2, instruction_set: str = "auto"
) -> Callable[..., Engine]:
    """Engines of one model; a number of blocks is meant for each KV group."""
    ops = NativeOps(threads, instruction_set)
    model = load_model(open_model(path), ops, weights_dtype)
    count = len(model.kv_groups(kv_format))
    return partial(_engine, model, ops, kv_format, count)


def _engine(model, ops, kv_format, count, *, num_blocks=None, **settings) -> Engine:  # type: ignore[no-untyped-def]
    return Engine(model, ops, kv_format, num_blocks=num_blocks or 64 * count, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_case(family: str, tmp_path: Path) -> None:
    make = maker(make_family(tmp_path / "model", family))
    families.gauntlet(make, PROMPT, offsets=range(13, 99, 17))


def large(*values: object) -> ParameterSet:
    return pytest.param(*values, marks=pytest.mark.large)


@pytest.mark.parametrize(
    ("family", "kv_format"),
    [
        ("gemma3", "int4"),
        ("deepseek_v2", "int8"),
        *[large("gemma3", kv_format) for kv_format in ("f16", "fp8_e4m3", "fp8_e5m2", "int8", "k8v4")],
        *[large("gpt_oss", kv_format) for kv_format in ("f16", "fp8_e4m3", "int8", "k8v4", "int4")],
        *[large("deepseek_v2", kv_format) for kv_format in ("f16", "fp8_e4m3", "fp8_e5m2")],
        *[large("deepseek_v3", kv_format) for kv_format in ("f16", "fp8_e4m3", "int8")],
    ],
)
def test_every_case_of_windows_and_latents_in_small_formats(family: str, kv_format: str, tmp_path: Path) -> None:
    """Windows with tails beside them, one KV head for all, latents with scales."""
    changes: dict[str, int] = {} if family.startswith("deepseek") else {"head_dim": 32}
    if family == "gemma3":
        changes["num_key_value_heads"] = 1
    make = maker(make_family(tmp_path / "model", family, **changes), kv_format=kv_format)
    families.gauntlet(make, PROMPT, offsets=range(13, 99, 17))


def test_latents_are_not_kept_in_int4(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="int4 keeps keys and values apart, and this model's latents are both"):
        maker(make_family(tmp_path / "model", "deepseek_v2"), kv_format="int4")


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v2"])
def test_threads_and_block_sizes(family: str, tmp_path: Path) -> None:
    path = make_family(tmp_path / "model", family)
    make, single = maker(path), maker(path, threads=1)
    expected = cases.cold(make, PROMPT)
    assert_same(cases.cold(single, PROMPT), expected, "one thread")
    assert_same(cases.cold(partial(make, block_size=32), PROMPT), expected, "blocks of 32")
    families.warm_at_offset(partial(make, block_size=32), PROMPT, expected, 71)


@pytest.mark.parametrize("family", ["gemma3", "mistral_window", "gpt_oss"])
def test_a_hit_at_every_offset_around_window_and_block(family: str, tmp_path: Path) -> None:
    """Windows of 21 tokens, blocks of 16: from before the first window has passed to beyond the third block."""
    make = maker(make_family(tmp_path / "model", family))
    expected = cases.cold(make, PROMPT)
    for num_hit in range(14, 54):
        families.warm_at_offset(make, PROMPT, expected, num_hit)


@pytest.fixture(scope="module", params=["gemma3", "gpt_oss", "deepseek_v2"])
def cold(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cold:
    ops, path = NativeOps(2), make_family(tmp_path_factory.mktemp("family") / "model", request.param)
    return Cold(load_model(open_model(path), ops, "bf16"), ops)


@given(shape=shapes, script=scripts)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_random_interleavings(cold: Cold, shape: Shape, script: list[tuple]) -> None:
    play(cold, shape, script)


@pytest.mark.large
@given(shape=shapes, script=scripts)
@settings(max_examples=1500, deadline=None)
@pytest.mark.timeout(1500)
def test_many_random_interleavings(cold: Cold, shape: Shape, script: list[tuple]) -> None:
    play(cold, shape, script)


@pytest.mark.large
@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
@pytest.mark.parametrize("weights_dtype", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "mixtral", "deepseek_v2", "deepseek_v3"])
def test_every_case_of_every_dtype(
    family: str, instruction_set: str, weights_dtype: str, kv_format: str, tmp_path: Path
) -> None:
    path = make_family(tmp_path / "model", family)
    make = maker(path, weights_dtype=weights_dtype, kv_format=kv_format, instruction_set=instruction_set)
    families.gauntlet(make, PROMPT, offsets=range(1, 99))
