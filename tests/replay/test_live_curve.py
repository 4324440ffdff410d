"""The live curve: at today's size it says what happens, at other sizes what a real run of that size gives."""

from __future__ import annotations

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.cache_curve import CacheCurve
from octavo.core.config import SchedulerConfig
from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.replay import live_curve
from octavo.replay.cost_model import CostModel
from octavo.replay.generated import generate
from octavo.replay.live_curve import LiveCurve
from octavo.replay.recency import RecencyOrder
from octavo.replay.timed import TimedConfig, TimedReplay
from octavo.replay.trace import TraceRequest

COST = CostModel("some", 0.01, 1e-5, 0.0, 0.0, 0.0, 0.0, 1e-3)


def curve_of(name: str, num_blocks: int, count: int = 500, groups: int = 1) -> CacheCurve:
    trace = LOADS[name][0][:count]
    spec = KVSpec(tuple(KVGroupSpec(f"g{at}", (at,), 1, 16, "bf16") for at in range(groups)), 16)
    config = TimedConfig(SchedulerConfig(8, 1024, 4096), spec, num_blocks * groups)
    replay = TimedReplay(config, COST)
    curve = LiveCurve(replay.core)
    report = replay.run(trace)
    assert report.refused == 0
    assert not curve._holdings, "nothing of a request that ended is kept"
    return curve.snapshot()


def agents(count: int) -> list[TraceRequest]:
    """Few long talks that grow turn by turn, in bursts of one."""
    chance, found, fresh = random.Random(3), [], iter(range(1000, 10**9))
    talks: list[list[int]] = [list(range(5)) for _ in range(12)]
    at = 0
    while len(found) < count:
        talk = chance.randrange(len(talks))
        for _ in range(chance.randrange(1, 8)):
            talks[talk] += [next(fresh) for _ in range(chance.randrange(1, 5))]
            found.append(TraceRequest(0.3 * at, 16 * len(talks[talk]), chance.randrange(2, 12), list(talks[talk]), 16))
            at += 1
        if len(talks[talk]) > 90:
            talks[talk] = list(range(5))
    return found


same_curve_of = functools.cache(curve_of)

LOADS = {
    "talks": (
        list(generate("generate:talks,requests=500,talks=25,turns=6,system=128,output=24,prompt=160,rate=20,seed=1")),
        500,
    ),
    "many systems": (
        list(
            generate("generate:talks,requests=500,talks=60,turns=3,systems=9,system=320,output=24,prompt=160,rate=20")
        ),
        900,
    ),
    "agents": (agents(500), 320),
}


@pytest.mark.parametrize("name", LOADS)
def test_at_todays_size_it_says_what_happened(name: str) -> None:
    num_blocks = LOADS[name][1]
    curve = same_curve_of(name, num_blocks)
    at_one = next(one for one in curve.estimates if one.scale == 1.0)
    assert 0.2 < curve.hit_rate < 0.97, "a load on which the size matters"
    assert at_one.hit_rate == pytest.approx(curve.hit_rate, abs=0.02)
    assert at_one.blocks == num_blocks
    rates = [one.hit_rate for one in curve.estimates]
    assert rates == sorted(rates)
    assert rates[-1] > rates[0] + 0.05


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("scale", [0.5, 2.0, 4.0])
def test_at_another_size_it_says_what_a_run_of_that_size_gives(name: str, scale: float) -> None:
    num_blocks = LOADS[name][1]
    predicted = next(one for one in same_curve_of(name, num_blocks).estimates if one.scale == scale)
    assert predicted.hit_rate == pytest.approx(same_curve_of(name, round(scale * num_blocks)).hit_rate, abs=0.03)


def test_a_sample_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    num_blocks = LOADS["talks"][1]
    whole = same_curve_of("talks", num_blocks)
    monkeypatch.setattr(live_curve, "MAX_GHOSTS", 2000)
    sampled = curve_of("talks", num_blocks)
    assert sampled.sample == 0.5
    assert sampled.ghost_blocks <= 2000
    for ours, exact in zip(sampled.estimates, whole.estimates, strict=True):
        assert ours.hit_rate == pytest.approx(exact.hit_rate, abs=0.06)


def test_kv_groups_count_as_one() -> None:
    num_blocks = LOADS["agents"][1]
    one, two = curve_of("agents", num_blocks, 150), curve_of("agents", num_blocks, 150, groups=2)
    assert two.num_blocks == one.num_blocks
    assert two.hit_rate == pytest.approx(one.hit_rate, abs=0.02)
    at_one = next(point for point in two.estimates if point.scale == 1.0)
    assert at_one.hit_rate == pytest.approx(two.hit_rate, abs=0.02)


def test_old_lookups_count_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_curve, "_FORGET_AFTER", 500)
    num_blocks = LOADS["talks"][1]
    curve = curve_of("talks", num_blocks)
    assert curve.lookup_blocks < 2000
    at_one = next(one for one in curve.estimates if one.scale == 1.0)
    assert at_one.hit_rate == pytest.approx(curve.hit_rate, abs=0.04)


def test_before_the_first_request_all_is_zero() -> None:
    curve = curve_of("talks", 100, 0)
    assert (curve.lookup_blocks, curve.hit_rate) == (0, 0.0)
    assert all(one.hit_rate == 0.0 for one in curve.estimates)


@given(st.lists(st.tuples(st.sampled_from(["put", "remove"]), st.integers(0, 9)), max_size=120), st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_the_order_is_that_of_a_list(calls: list[tuple[str, int]], capacity: int) -> None:
    order, shadow = RecencyOrder(capacity), []
    for call, key in calls:
        if key in shadow:
            shadow.remove(key)
        if call == "put":
            shadow = [key, *shadow][:capacity]
            order.put(key)
        else:
            order.remove(key)
        assert len(order) == len(shadow)
        assert [order.depth(one) for one in range(10)] == [
            shadow.index(one) if one in shadow else None for one in range(10)
        ]
