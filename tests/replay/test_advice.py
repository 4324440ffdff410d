"""Advice: who goes on with which talk, what each reuse hits, what it is worth."""

from __future__ import annotations

import pytest

from octavo.replay.advice import Advice, AdviceStudy, Tiers, sum_of_lengths
from octavo.replay.cost_model import CostModel
from octavo.replay.generated import generate
from octavo.replay.sessions import Repeat, Sessions
from octavo.replay.trace import TraceRequest

COST = CostModel("a millisecond a token", 0.0, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0)
TIERS = Tiers(1000, 10_000, 100_000)


def advice_of(trace: list[TraceRequest], tiers: Tiers = TIERS) -> Advice:
    study = AdviceStudy(COST, tiers, bytes_per_token=1000)
    for one in trace:
        study.add(one)
    return study.advice()


def of(advice: Advice) -> dict[str, int]:
    return {one.name: one.hit_tokens for one in advice.reuses}


def test_talks_are_told_from_shared_beginnings() -> None:
    sessions = Sessions()
    assert sessions.add([1, 2, 3, 4], 4) == Repeat(0, 0, 0)
    assert sessions.add([1, 2, 9, 8], 4) == Repeat(1, 2, 0), "another talk behind the same beginning"
    assert sessions.add([1, 2, 3, 5, 6], 5) == Repeat(0, 3, 3), "the first talk goes on; its last block was not full"
    assert sessions.add([1, 2, 9, 8, 7], 5) == Repeat(1, 4, 4)
    assert sessions.add([70, 71, 72], 3) == Repeat(2, 0, 0)
    assert sessions.count == 3


def test_names_of_sessions_are_believed() -> None:
    sessions = Sessions()
    assert sessions.add([1, 2, 3], 3, "a").session == sessions.add([7, 8], 2, "a").session
    assert sessions.add([1, 2, 3], 3, "b").own == 0


def test_five_turns() -> None:
    """The talk of five turns: each finds all that was said before, and computes what is new."""
    trace = list(generate("generate:talks,requests=5,talks=1,turns=5,system=512,prompt=128,output=256"))
    advice = advice_of(trace)
    assert [turn.prompt_tokens for turn in advice.turns] == [640, 1024, 1408, 1792, 2176]
    assert [turn.hit_tokens for turn in advice.turns] == [0, 640, 1024, 1408, 1792]
    assert [turn.prompt_tokens - turn.hit_tokens for turn in advice.turns] == [640, 384, 384, 384, 384]
    assert advice.turns[-1].ttft_s == pytest.approx(0.384)
    assert of(advice) == {
        "within a request": 0,
        "shared beginning": 0,
        "talks that go on": 640 + 1024 + 1408 + 1792,
        "host memory": 0,
        "disk": 0,
    }
    assert advice.prefill_s == pytest.approx(7.040)
    talks = next(one for one in advice.reuses if one.name == "talks that go on")
    assert talks.prefill_s_saved == pytest.approx(4.864)
    assert talks.ttft_s_saved == pytest.approx(4.864 / 5)
    assert 90 * 16_000 < talks.bytes_needed <= 112 * 16_000, "most of the 1,792 tokens that the last turn finds"
    assert talks.pays


def test_a_shared_beginning_alone() -> None:
    trace = [TraceRequest(0.0, 96, 4, [0, 1, 100 + at, 200 + at, 300 + at, 400 + at], 16) for at in range(20)]
    assert of(advice_of(trace))["shared beginning"] == 19 * 32
    assert of(advice_of(trace))["talks that go on"] == 0


def test_lower_tiers_hold_what_the_cache_lost_less_the_way_back() -> None:
    trace = [TraceRequest(0.0, 160, 1, [100 * at + n for n in range(10)], 16) for at in (*range(30), *range(30))]
    advice = advice_of(trace, Tiers(50, 100, 1000))
    found = of(advice)
    assert found["talks that go on"] == 0
    assert found["host memory"] == 0, "all 300 blocks come round again: nothing is within 150"
    assert found["disk"] == 30 * 160
    disk = advice.reuses[-1]
    assert disk.prefill_s_saved == pytest.approx(30 * 160 * 1e-3 - 30 * 160 * 1000 / 3e9)
    assert of(advice_of(trace, Tiers(50, 260, 1000)))["host memory"] == 30 * 160


def test_many_requests_are_not_shown_one_by_one() -> None:
    trace = [TraceRequest(0.0, 16, 1, [at], 16) for at in range(100)]
    advice = advice_of(trace)
    assert advice.turns == ()
    assert not any(one.pays for one in advice.reuses[1:])


def test_without_a_cache_every_token_runs_the_text_again() -> None:
    assert sum_of_lengths(10, 1) == 0
    assert sum_of_lengths(10, 3) == 11 + 12
    within = advice_of([TraceRequest(0.0, 10, 3)]).reuses[0]
    assert within.prefill_s_saved == pytest.approx(0.023)
