"""A cache under a policy, run through the engine's block manager, against the curve that needs no run."""

from __future__ import annotations

import random

import pytest

from octavo.errors import ConfigError
from octavo.replay.cache_policy import run_policy
from octavo.replay.cache_study import CacheStudy, CacheStudyConfig
from octavo.replay.trace import TraceRequest


def load() -> list[TraceRequest]:
    chance, found = random.Random(7), []
    for _ in range(400):
        talk, length = chance.randrange(12), chance.randrange(1, 9)
        ids = [talk * 100 + at if at > 1 else at for at in range(length)]
        found.append(TraceRequest(0.0, 512 * length, 1, ids, 512))
    return found


@pytest.mark.parametrize("size", [8, 20, 50, 100])
def test_least_recently_used_hits_what_the_curve_says(size: int) -> None:
    """But for the one block that a running request fills last, which the engine may evict for."""
    requests = load()
    study = CacheStudy(CacheStudyConfig(asked_blocks=size))
    for one in requests:
        study.add(one)
    exact = study.report().at
    found = run_policy(requests, "lru", size, None)
    assert (found.requests, found.blocks, found.tokens) == (400, study.report().blocks, study.report().tokens)
    assert found.hit_blocks == pytest.approx(exact.hit_blocks, abs=0.01 * found.blocks)
    assert found.token_hit_rate == pytest.approx(exact.token_hit_rate, abs=0.01)


def test_least_frequently_used_keeps_what_is_used() -> None:
    """Two talks that come again and again, at last among many that come once."""
    requests = [TraceRequest(0.0, 1024, 1, [turn % 2 * 10, turn % 2 * 10 + 1], 512) for turn in range(10)]
    for turn in range(300):
        requests.append(TraceRequest(0.0, 1024, 1, [turn % 2 * 10, turn % 2 * 10 + 1], 512))
        requests += [
            TraceRequest(0.0, 1536, 1, [1000 + 30 * turn + 3 * n + k for k in range(3)], 512) for n in range(3)
        ]
    lru, lfu = run_policy(requests, "lru", 12, None), run_policy(requests, "lfu", 12, None)
    assert lfu.hit_blocks > 500
    assert lru.hit_blocks < 20


def test_priority_keeps_what_urgent_requests_had() -> None:
    """An urgent talk now and then, among many others; the urgent one's blocks stay, whatever comes."""
    requests = []
    for turn in range(100):
        requests.append(TraceRequest(0.0, 1024, 1, [0, 1], 512, priority=-1))
        requests += [
            TraceRequest(0.0, 1536, 1, [1000 + 30 * turn + 3 * n + k for k in range(3)], 512) for n in range(5)
        ]
    assert run_policy(requests, "lru", 8, None).hit_blocks == 0
    assert run_policy(requests, "priority", 8, None).hit_blocks == 99 * 2


def test_requests_larger_than_the_cache_are_counted() -> None:
    assert run_policy([TraceRequest(0.0, 2048, 1, [1, 2, 3, 4], 512)], "lru", 3, None).too_large == 1


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="--policy is 'mru'; it must be one of lru, lfu, priority"):
        run_policy([], "mru", 10, None)
