"""Cache-only replay: counts, accounting of partial blocks, block sizes, tenants, samples."""

from __future__ import annotations

import random
from array import array

import pytest

from octavo.errors import ConfigError
from octavo.replay.cache_blocks import BlockSample
from octavo.replay.cache_study import MAX_TENANTS, OTHER_TENANTS, CacheReport, CacheStudy, CacheStudyConfig
from octavo.replay.trace import TraceRequest


def ids(*names: int, last: int = 512, tenant: str = "") -> TraceRequest:
    return TraceRequest(0.0, 512 * (len(names) - 1) + last, 10, names, 512, tenant=tenant)


def text(tokens: list[int], output: list[int] | None = None, namespace: str = "") -> TraceRequest:
    answer = array("I", output or [])
    return TraceRequest(0.0, len(tokens), len(answer), (), 0, array("I", tokens), answer, namespace=namespace)


def study(requests: list[TraceRequest], **config: object) -> CacheReport:
    made = CacheStudy(CacheStudyConfig(**config))  # type: ignore[arg-type]
    for request in requests:
        made.add(request)
    return made.report()


def test_counts_of_a_trace_that_names_blocks() -> None:
    report = study([ids(1, 2, 3), ids(1, 2, 4, last=100), ids(5)], asked_blocks=2)
    assert (report.requests, report.tokens, report.blocks) == (3, 1536 + 1124 + 512, 7)
    assert report.distinct_blocks == 5
    # The second request finds 1 and 2, which need a cache of one and of two blocks.
    assert (report.at.blocks, report.at.hit_blocks, report.at.hit_rate) == (2, 2, 2 / 7)
    assert report.at.hit_tokens == 1024
    assert report.unlimited.hit_blocks == 2


def test_the_curve_has_every_size_that_matters() -> None:
    report = study([ids(1, 2, 3), ids(9), ids(1, 2, 3)])
    rates = {point.blocks: point.hit_blocks for point in report.curve}
    assert rates == {1: 0, 2: 1, 3: 2, 4: 3}
    assert [point.hit_rate for point in report.curve] == sorted(point.hit_rate for point in report.curve)


def test_partial_blocks_take_a_block_or_their_tokens() -> None:
    """The last block of the second request has 12 tokens. By tokens all fits two blocks, as blocks it needs three."""
    requests = [ids(1), ids(2, last=12), ids(3, last=12), ids(1)]
    assert study(requests, asked_blocks=2).at.hit_blocks == 0
    assert study(requests, asked_blocks=3).at.hit_blocks == 1
    assert study(requests, asked_blocks=2, partial_blocks="tokens").at.hit_blocks == 1
    assert study(requests, asked_blocks=1, partial_blocks="tokens").at.hit_blocks == 0


def test_smaller_blocks_cut_those_of_the_trace() -> None:
    whole = study([ids(1, 2, last=256), ids(1, 3)])
    cut = study([ids(1, 2, last=256), ids(1, 3)], block_size=128)
    assert (cut.blocks, cut.unlimited.hit_blocks) == (6 + 8, 4)
    assert cut.unlimited.hit_tokens == whole.unlimited.hit_tokens == 512
    joined = study([ids(1, 2), ids(1, 3), ids(1, 2)], block_size=1024)
    assert (joined.blocks, joined.unlimited.hit_blocks) == (3, 1)
    with pytest.raises(ConfigError, match=r"--block-size is 100, but the trace names blocks of 512 tokens"):
        study([ids(1)], block_size=100)


def test_equal_rounds_hit_k_of_k_plus_1() -> None:
    """Turns of 4,096 tokens with answers of one: what a fourth round can hit of its prompt is 3 of 4 (published:
    0, 0.499939, 0.666558, 0.749863, github.com/kvcache-ai/Mooncake/issues/3317)."""
    numbers = iter(range(100_000))
    said: list[int] = []
    rates = []
    made = CacheStudy(CacheStudyConfig())
    hits = tokens = 0
    for _ in range(4):
        said += [next(numbers) for _ in range(4096)]
        answer = [next(numbers)]
        made.add(text(said, answer))
        said = said + answer
        report = made.report()
        rates.append((report.unlimited.hit_tokens - hits) / (report.tokens - tokens))
        hits, tokens = report.unlimited.hit_tokens, report.tokens
    assert [round(rate, 6) for rate in rates] == [0.0, 0.499939, 0.666558, 0.749863]


def test_answers_are_found_by_the_next_turn() -> None:
    prompt, answer = list(range(20)), list(range(100, 145))
    report = study([text(prompt, answer), text([*prompt, *answer, 7])])
    # 65 tokens said, 64 of them computed: four blocks of the 66 that the second turn has.
    assert (report.blocks, report.unlimited.hit_blocks, report.unlimited.hit_tokens) == (1 + 4, 4, 64)
    assert report.unlimited.token_hit_rate == 64 / (20 + 66)


def test_namespaces_share_nothing() -> None:
    same = list(range(64))
    assert study([text(same, namespace="a"), text(same, namespace="a")]).unlimited.hit_blocks == 4
    assert study([text(same, namespace="a"), text(same, namespace="b")]).unlimited.hit_blocks == 0


def test_lengths_hit_nothing_and_say_so() -> None:
    report = study([TraceRequest(0.0, 100, 10), TraceRequest(1.0, 100, 10)])
    assert (report.blocks, report.unlimited.hit_blocks, report.names_blocks) == (12, 0, False)


def test_tenants_share_one_cache() -> None:
    report = study([ids(1, 2, tenant="a"), ids(1, 2, tenant="b"), ids(9, tenant="b")], asked_blocks=4)
    of = {one.tenant: one for one in report.tenants}
    assert (of["a"].requests, of["a"].hit_blocks, of["b"].blocks, of["b"].hit_blocks) == (1, 0, 3, 2)
    assert sum(one.hit_blocks for one in report.tenants) == report.at.hit_blocks
    assert of["b"].curve[-1].hit_blocks == 2


def test_many_tenants_are_counted_together() -> None:
    report = study([ids(number, tenant=f"t{number}") for number in range(MAX_TENANTS + 50)])
    assert len(report.tenants) <= MAX_TENANTS + 1
    assert next(one for one in report.tenants if one.tenant == OTHER_TENANTS).requests == 50


def test_a_sample_is_near_the_whole_within_its_error() -> None:
    """A load of talks behind one system prompt; the error that is told must be of the size of the real one."""
    chance = random.Random(3)
    talks: list[list[int]] = [[0, 1, 2] for _ in range(150)]
    numbers = iter(range(10, 10_000_000))
    requests = []
    for _ in range(4000):
        talk = chance.choice(talks)
        talk += [next(numbers) for _ in range(chance.randrange(1, 6))]
        requests.append(ids(*talk))
        if len(talk) > 40:
            talks[talks.index(talk)] = [0, 1, 2]
    size = 1500
    whole = study(requests, asked_blocks=size)
    sampled = study(requests, asked_blocks=size, sample=0.1)
    assert 0.2 < whole.at.hit_rate < 0.99
    assert sampled.blocks == whole.blocks
    assert abs(sampled.at.hit_rate - whole.at.hit_rate) < 4 * sampled.at.hit_rate_error + 0.003
    assert 0 < sampled.at.hit_rate_error < 0.05


def test_a_sample_is_the_same_in_every_process() -> None:
    sample = BlockSample(0.25)
    assert [sample.group(name) for name in (1, 2, 3, (1, 2), b"12345678", "x")] == [-1, 14, -1, 0, -1, -1]
    share = sum(sample.group(name) >= 0 for name in range(40_000)) / 40_000
    assert abs(share - 0.25) < 0.01
    with pytest.raises(ConfigError, match="--sample is 0"):
        BlockSample(0.0)
