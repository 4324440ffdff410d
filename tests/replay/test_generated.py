"""Loads that are made up: functions of their seed, of the lengths asked for, in bounded memory."""

from __future__ import annotations

import itertools
import statistics

import pytest

from octavo.errors import ConfigError
from octavo.replay.cache_study import CacheStudy, CacheStudyConfig
from octavo.replay.generated import generate
from octavo.replay.trace import TraceRequest


def test_lengths_have_the_means_asked_for() -> None:
    found = list(generate("generate:lengths,requests=20000,prompt=50,output=200,rate=4"))
    assert statistics.mean(one.num_prompt_tokens for one in found) == pytest.approx(50, rel=0.05)
    assert statistics.mean(one.num_output_tokens for one in found) == pytest.approx(200, rel=0.05)
    assert found[-1].arrival_s == pytest.approx(5000, rel=0.05)


def test_the_seed_decides() -> None:
    def some(seed: int) -> list[TraceRequest]:
        return list(generate(f"generate:talks,requests=50,seed={seed}"))

    assert some(1) == some(1)
    assert some(1) != some(2)


def test_talks_go_on_with_what_was_said() -> None:
    of_session: dict[str, list[int]] = {}
    for one in generate("generate:talks,requests=300,talks=5,turns=4,system=32,systems=2"):
        before, now = of_session.get(one.session, []), list(one.block_ids)
        assert now[: len(before)] == before
        assert len(set(now)) == len(now)
        of_session[one.session] = now  # type: ignore[assignment]
    starts = {tuple(ids[:2]) for ids in of_session.values()}
    assert len(starts) == 2, "two system prompts of two blocks"
    own = [set(ids[2:]) for ids in of_session.values()]
    assert all(not a & b for a, b in itertools.combinations(own, 2)), "beyond them nothing is shared"


def test_memory_is_bounded_by_the_cache_not_by_the_load() -> None:
    study = CacheStudy(CacheStudyConfig(max_blocks=500))
    kept = []
    for number, one in enumerate(generate("generate:talks,requests=30000,talks=3,system=16,prompt=16,output=16")):
        study.add(one)
        if number % 1000 == 0:
            study.report(2)
            assert study._distances is not None
            kept.append(study._distances.num_kept)
    assert max(kept) <= 500


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("generate:poems", "is no load that can be made up; there are lengths, talks, alpaca, sharegpt"),
        ("generate:lengths,color=1", "there is no 'color'; lengths has requests, prompt"),
        ("generate:lengths,requests=many", "requests is 'many'; it must be a number"),
        ("generate:lengths,requests=-1", "requests is -1; it must be from 0"),
    ],
)
def test_what_cannot_be_made_up_is_said(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(source)
