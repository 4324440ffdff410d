"""Reuse distances against a cache that is simulated block by block, and against the engine's own block manager."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.block_manager import BlockManager
from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.replay import reuse
from octavo.replay.dominance import sums_below
from octavo.replay.reuse import NEVER, ReuseDistances

# A request: blocks of one of a few talks, up to some length. Names tell the whole prefix.
TALKS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 2)), min_size=1, max_size=40)


def blocks_of(talk: int, length: int) -> list[int]:
    """Talks 0 and 1, and 2 and 3, begin alike."""
    return [(talk // 2 if at < 2 else 100 + talk) * 1000 + at for at in range(length)]


def distances_of(
    requests: list[tuple[list[int], int]], weights: dict[int, int] | None = None, limit: int | None = None
) -> list[list[int]]:
    """For each request, the distance of each block of its prompt; the last `produced` blocks are no prompt."""
    found = ReuseDistances(limit)
    for number, (blocks, produced) in enumerate(requests):
        prompt = blocks[: len(blocks) - produced]
        worth = [1 if weights is None else weights[block] for block in prompt]
        found.add(prompt, worth, [number * 100 + at for at in range(len(prompt))], blocks[len(prompt) :])
    found.flush()
    answer: list[list[int]] = [[NEVER] * (len(blocks) - produced) for blocks, produced in requests]
    for done in found.take():
        for distance, tag in zip(done.distances.tolist(), done.tags.tolist(), strict=True):
            answer[tag // 100][tag % 100] = distance
    return answer


def lru_hits(requests: list[tuple[list[int], int]], capacity: int, weights: dict[int, int]) -> list[list[bool]]:
    """Which blocks a cache of this size has when each request comes."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = []
    for blocks, produced in requests:
        found.append([block in cache for block in blocks[: len(blocks) - produced]])
        for block in reversed(blocks):
            cache.pop(block, None)
            cache[block] = None
        while sum(weights[block] for block in cache) > capacity:
            cache.popitem(last=False)
    return found


@given(TALKS, st.integers(1, 30), st.sampled_from([3, 7, 1 << 17]))
@settings(max_examples=150, deadline=None)
def test_a_block_is_a_hit_exactly_where_its_distance_fits(
    talks: list[tuple[int, int, int]], capacity: int, batch: int
) -> None:
    requests = [(blocks_of(talk, length + more), more) for talk, length, more in talks]
    weights = {block: 1 for blocks, _ in requests for block in blocks}
    before, reuse._BATCH = reuse._BATCH, batch
    try:
        found = distances_of(requests)
        bounded = distances_of(requests, limit=capacity)
    finally:
        reuse._BATCH = before
    expected = lru_hits(requests, capacity, weights)
    assert [[0 < one <= capacity for one in request] for request in found] == expected
    assert [[one != NEVER for one in request] for request in bounded] == expected


@given(TALKS, st.integers(1, 100))
@settings(max_examples=100, deadline=None)
def test_weights_count_instead_of_blocks(talks: list[tuple[int, int, int]], capacity: int) -> None:
    requests = [(blocks_of(talk, length), 0) for talk, length, _ in talks]
    weights = {block: 1 + block % 7 for blocks, _ in requests for block in blocks}
    found = distances_of(requests, weights)
    assert [[0 < one <= capacity for one in request] for request in found] == lru_hits(requests, capacity, weights)


@given(TALKS, st.integers(14, 40))
@settings(max_examples=100, deadline=None)
def test_the_engines_block_manager_hits_the_same_blocks(talks: list[tuple[int, int, int]], num_blocks: int) -> None:
    """One request after the other, so that nobody holds blocks but who runs."""
    spec = KVSpec((KVGroupSpec("full", (0,), 1, 16, "f32"),), 4)
    manager = BlockManager(spec, num_blocks, token_exact_hits=False)
    requests, actual = [], []
    for number, (talk, length, _) in enumerate(talks):
        names = blocks_of(talk, length)
        # One token more, which is never hit; it takes a block that is given back, and that may evict one.
        request = Request(
            f"r{number}", [token for name in names for token in [name] * 4] + [7], SamplingParams(), seed=0
        )
        match = manager.find_prefix(request)
        manager.attach_prefix(request, match)
        assert manager.grow(request, len(request.token_ids)) is not None
        request.num_computed_tokens = len(request.token_ids)
        manager.commit(request)
        manager.release(request)
        requests.append((names, 0))
        actual.append(len(match.nodes))
    found = distances_of(requests)
    exact = [sum(0 < one <= num_blocks for one in request) for request in found]
    with_tail = [sum(0 < one <= num_blocks - 1 for one in request) for request in found]
    assert all(low <= hits <= high for low, hits, high in zip(with_tail, actual, exact, strict=True))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), max_size=40), st.data())
@settings(max_examples=100, deadline=None)
def test_sums_below_is_what_its_name_says(entries: list[tuple[int, int]], data: st.DataObject) -> None:
    values = np.array([value for value, _ in entries], np.int64)
    weights = np.array([weight for _, weight in entries], np.int64)
    asked = data.draw(st.lists(st.tuples(st.integers(0, len(entries)), st.integers(0, 25)), max_size=10))
    ends, limits = np.array([a for a, _ in asked], np.int64), np.array([b for _, b in asked], np.int64)
    expected = [sum(w for v, w in entries[:end] if v < limit) for end, limit in asked]
    assert sums_below(values, weights, ends, limits).tolist() == expected
    counts = [sum(v < limit for v, _ in entries[:end]) for end, limit in asked]
    assert sums_below(values, None, ends, limits).tolist() == counts


def test_what_lies_deeper_than_the_largest_cache_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "_BATCH", 50)
    found = ReuseDistances(max_weight=20)
    for number in range(2000):
        found.add([number * 2, number * 2 + 1], [1, 1], [0, 0])
        found.take()
        assert found.num_kept <= 20 + 50
