"""The search for layers to leave out, on costs that add up; and limits in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from octavo.certify.divergence import Distance
from octavo.certify.limits import Limits
from octavo.certify.measure import PathResult
from octavo.certify.mixes import Search, find_mixes
from octavo.certify.setting import Setting
from octavo.core.kv_groups import LayerGeometry, build_groups
from octavo.core.kv_spec import KVSpec
from octavo.errors import ConfigError

NUM_LAYERS = 12
GOOD = PathResult(Distance(1000, 0.001, 0.01, 0.99, 12.0), 0, True)


def setting(skipped: tuple[int, ...]) -> Setting:
    formats = ["bf16" if index in skipped else "int8" for index in range(NUM_LAYERS)]
    groups = build_groups([LayerGeometry(2, 64, kv_format) for kv_format in formats])
    return Setting("int8", skipped, None, KVSpec(groups, 16))


def result(kl_mean: float, top1: float = 0.99) -> PathResult:
    return replace(GOOD, distance=replace(GOOD.distance, kl_mean=kl_mean, top1=top1))


class Costs:
    """Every layer in the format adds its cost."""

    def __init__(self, costs: Sequence[float]) -> None:
        self.costs = costs
        self.num_measured = 0

    def measure(self, settings: Sequence[Setting]) -> list[PathResult]:
        self.num_measured += len(settings)
        kept = [[c for index, c in enumerate(self.costs) if index not in one.skip_layers] for one in settings]
        return [result(sum(costs)) for costs in kept]

    def search(self, max_kl: float, fewer_bytes_than: int = 1 << 30) -> Search:
        return Search(self.measure, setting, NUM_LAYERS, Limits(max_kl=max_kl), fewer_bytes_than)


@pytest.mark.parametrize("sensitive", [(3,), (0, 11), (2, 5, 7), (1, 2, 3, 4, 8)])
def test_the_sensitive_layers_are_left_out_and_no_others(sensitive: tuple[int, ...]) -> None:
    costs = Costs([0.1 if index in sensitive else 0.001 for index in range(NUM_LAYERS)])
    found = find_mixes(costs.search(max_kl=0.02))
    assert found[0].skip_layers == sensitive
    assert all(set(sensitive) <= set(one.skip_layers) for one in found)
    assert [one.bytes_per_token for one in found] == sorted(one.bytes_per_token for one in found)
    assert costs.num_measured <= NUM_LAYERS + 10


def test_nothing_is_found_where_it_would_be_too_large_or_where_nothing_helps() -> None:
    costs = Costs([0.1] * NUM_LAYERS)
    assert find_mixes(costs.search(max_kl=0.05)) == []
    one_left_out = setting((3,)).bytes_per_token
    helpful = Costs([0.1 if index == 3 else 0.001 for index in range(NUM_LAYERS)])
    assert find_mixes(helpful.search(max_kl=0.02, fewer_bytes_than=one_left_out)) == []
    assert find_mixes(helpful.search(max_kl=0.02, fewer_bytes_than=one_left_out + 1))[0].skip_layers == (3,)


def test_why_something_is_not_certified() -> None:
    limits = Limits()
    assert limits.broken_by({"cold": GOOD, "long": GOOD}, 0.9, 0.95) == ()
    assert limits.broken_by({"cold": result(0.021)}, None, None) == ("KL is 0.0210, above 0.02",)
    assert limits.broken_by({"cold": result(float("nan"))}, None, None) == ("KL is nan, above 0.02",)
    assert limits.broken_by({"long": result(0.001, 0.9)}, None, None) == (
        "top-1 over 1000 tokens is 90.00%, below 97.00%",
    )
    assert limits.broken_by({"batched": replace(GOOD, is_same=False)}, None, None) == (
        "the path batched gives other bits than cold",
    )
    (told,) = limits.broken_by({"cold": GOOD}, 0.5, 0.6)
    assert told == "it finds 50% of the needles, and the f32 cache 60%"
    for wrong in ({"max_kl": 0.0}, {"max_kl": float("nan")}, {"min_top1": 1.1}, {"max_needle_loss": -0.1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Limits(**wrong)
