"""Configs by strangers: whatever stands in them, there is a plan or one clear error, soon."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import OctavoError
from octavo.planner.comparisons import Comparisons
from octavo.planner.config_geometry import geometry_of
from octavo.planner.plan import PlanRequest, make_plan
from octavo.planner.report import report
from tests.planner.small_configs import CASES

KEYS = sorted({key for _, config in CASES.values() for key in config})
KEYS += ["layer_types", "text_config", "quantization_config", "rope_scaling", "architectures", "compress_ratios"]
KEYS += ["block_configs", "hybrid_override_pattern", "linear_attn_config", "attn_config", "ffn_config", "moe_layers"]
NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 7, 1 << 20, 1 << 45, 10**30, 0.5, -2.5, 1e300, float("inf"), float("nan")])
EXAMPLES = 6  # of each case
JUNK = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.just("sliding_attention"),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner),
    max_leaves=6,
)


def refusal(config: dict[str, Any]) -> str:
    """The error of a plan of the config, or "" where there is a plan. Any other exception comes through."""
    try:
        plan = make_plan(geometry_of(config, "m"), PlanRequest(memory_bytes=10**9))
        json.dumps(report(plan, Comparisons(plan)))
    except OctavoError as error:
        return str(error)
    return ""


def check(config: dict[str, Any]) -> None:
    found = refusal(config)
    assert "\n" not in found
    assert len(found) < 2000


@pytest.mark.parametrize("name", sorted(CASES))
@given(changes=st.dictionaries(st.sampled_from(KEYS), JUNK, min_size=1, max_size=4))
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_plan_or_one_clear_error(name: str, changes: dict[str, Any]) -> None:
    kind, config = CASES[name]
    check({"model_type": kind, **config, **changes})


@given(quantised=JUNK)
@settings(max_examples=20 * EXAMPLES, deadline=None)
def test_quantisation_by_strangers(quantised: Any) -> None:
    kind, config = CASES["llama"]
    for given_as in (quantised, {"quant_method": "fp8", "ignore": quantised}, {"quantized_layers": quantised}):
        check({"model_type": kind, **config, "quantization_config": given_as})


@pytest.mark.parametrize("pattern", ["re:(", "re:" + "a" * 1000, "*" * 500, "re:(a+)+$"])
def test_patterns_by_strangers(pattern: str) -> None:
    kind, config = CASES["llama"]
    quantised = {"quant_method": "fp8", "ignore": [pattern]}
    assert "pattern" in refusal({"model_type": kind, **config, "quantization_config": quantised})
