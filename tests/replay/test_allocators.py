"""Allocators and the batches that run on them: rooms never overlap, shares add up, and the findings of the paper."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.replay.allocator_study import LengthLimits, LengthLoad, allocators, compare, highest_rate, length_load
from octavo.replay.allocators import BuddySystem, Contiguous, Lengths, Paged
from octavo.replay.batching import Batching, BatchLimits, Outcome
from octavo.replay.cost_model import CostModel
from octavo.replay.generated import generate
from octavo.replay.trace import TraceRequest

# A second a step, whatever is in it: then times count steps.
ONE_SECOND = CostModel("one second", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


@given(st.integers(1, 300), st.integers(0, 6), st.lists(st.tuples(st.booleans(), st.integers(1, 64)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_rooms_of_the_buddy_system_never_overlap_and_all_come_back(
    num_slots: int, order: int, calls: list[tuple[bool, int]]
) -> None:
    largest = 1 << order
    buddies, held = BuddySystem(num_slots, largest), {}
    for takes, size in calls:
        if takes and size <= largest:
            at = buddies.take(size)
            if at is not None:
                room = 1 << (size - 1).bit_length()
                assert at >= 0
                assert at + room <= num_slots
                assert all(at + room <= other or other + length <= at for other, length in held.items())
                held[at] = room
        elif held:
            at = sorted(held)[size % len(held)]
            del held[at]
            buddies.give_back(at)
    for at in list(held):
        buddies.give_back(at)
    fresh = BuddySystem(num_slots, largest)
    assert buddies._free == fresh._free, "what was joined again is what was there at first"


def run(allocator: Contiguous | Paged, load: list[Lengths], **limits: object) -> Outcome:
    return Batching(allocator, ONE_SECOND, BatchLimits(**limits)).run(load)  # type: ignore[arg-type]


def test_a_request_alone_takes_a_step_for_each_token_of_its_answer() -> None:
    found = run(Paged(64, 4), [Lengths(10, 7)])
    assert (found.duration_s, found.requests, found.output_tokens, found.max_concurrency) == (7.0, 1, 7, 1)
    assert found.latency_s_per_token == 1.0


def test_requests_leave_with_their_last_token_and_others_take_their_place() -> None:
    load = [Lengths(4, 2), Lengths(4, 6), Lengths(4, 4)]
    assert run(Contiguous("c", 32, "max", 16), load).duration_s == 6.0, "the third runs when the first has left"
    assert run(Contiguous("c", 32, "max", 16), load, whole_batches=True).duration_s == 10.0


@pytest.mark.parametrize(("kind", "at_once"), [("max", 2), ("pow2", 4), ("oracle", 8)])
def test_what_is_set_aside(kind: str, at_once: int) -> None:
    """128 slots, answers of 9 tokens to prompts of 8: 64 slots, 8 + 16 (a run of 32), or 16."""
    assert run(Contiguous("c", 128, kind, 64), [Lengths(8, 9)] * 20).max_concurrency == at_once


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=25),
    st.sampled_from([1, 2, 8]),
    st.sampled_from(["max", "pow2", "oracle", "paged", "spare"]),
)
@settings(max_examples=150, deadline=None)
def test_shares_add_up_and_all_is_given_back(pairs: list[tuple[int, int]], block_size: int, kind: str) -> None:
    load = [Lengths(prompt, output) for prompt, output in pairs]
    if kind in ("paged", "spare"):
        allocator: Contiguous | Paged = Paged(96, block_size, spare_per_request=int(kind == "spare"))
    else:
        allocator = Contiguous(kind, 96, kind, 40)
    found = run(allocator, load)
    shares = (found.shares.used, found.shares.reserved, found.shares.internal, found.shares.external)
    assert all(-1e-9 <= share <= 1 for share in shares)
    assert sum(shares) == pytest.approx(1.0) or sum(shares) == 0.0
    if isinstance(allocator, Paged):
        assert allocator._num_free == 96 // block_size
    else:
        assert not allocator._starts


def test_a_preempted_request_comes_back_and_ends() -> None:
    """Two requests that grow to 20 tokens in 32 slots: one has to wait for the other."""
    found = run(Paged(32, 4), [Lengths(4, 17), Lengths(4, 17)])
    assert found.preemptions > 0
    assert found.output_tokens == 34


def test_the_findings_of_the_paper() -> None:
    """At the mean lengths of the paper's ShareGPT and its KV cache (12 GB, 15.7K slots); exponential lengths."""
    from octavo.replay.cost_model import roofline
    from octavo.replay.hardware import find_hardware
    from octavo.replay.model_shape import shape_of

    shape = shape_of("opt-13b")
    load = length_load(generate("generate:sharegpt,requests=500"), LengthLimits(2048, max_requests=500))
    cost = roofline(shape, find_hardware("A100-40GB"), 819_200)
    rows = {row.outcome.allocator: row.outcome for row in compare(load, cost, 15_728, 2048)}
    for name, published in (("orca max", 0.204), ("orca pow2", 0.268), ("orca oracle", 0.382)):
        assert rows[name].shares.used == pytest.approx(published, abs=0.05)
    assert rows["paged 16"].shares.used > 0.96
    assert rows["orca max"].max_concurrency == 7, "the paper: about seven requests"
    at_full_load = {name: rows["paged 16"].requests_per_s / one.requests_per_s for name, one in rows.items()}
    assert 1.7 < at_full_load["orca oracle"] < at_full_load["orca pow2"] < at_full_load["orca max"] < at_full_load["ft"]
    shares = [rows[f"paged {size}"].shares.used for size in (1, 16, 64, 256)]
    assert shares == sorted(shares, reverse=True)


def test_large_blocks_hurt_short_requests_only() -> None:
    def throughputs(source: str, count: int) -> dict[str, float]:
        load = length_load(generate(source), LengthLimits(2048, max_requests=count))
        cost = CostModel("decode", 0.02, 1e-4, 0.0, 0.0, 7e-7, 0.0, 1e-3)
        made = [one for one in allocators(15_728, 2048, (16, 64, 128, 256)) if one[0].startswith("paged")]
        return {name: Batching(a, cost, BatchLimits()).run(load.requests).tokens_per_s for name, a, _ in made}

    long, short = throughputs("generate:sharegpt,requests=300", 300), throughputs("generate:alpaca,requests=900", 900)
    assert long["paged 128"] > 0.9 * long["paged 16"]
    assert short["paged 128"] < 0.9 * short["paged 16"]
    assert short["paged 256"] < 0.7 * short["paged 16"]


def test_what_does_not_fit_the_context() -> None:
    requests = [TraceRequest(0.0, 100, 10), TraceRequest(0.0, 30, 10), TraceRequest(0.0, 5, 60)]
    assert length_load(requests, LengthLimits(50)) == LengthLoad((Lengths(30, 10),), 2, 0)
    cut = length_load(requests, LengthLimits(50, too_long="truncate"))
    assert cut == LengthLoad((Lengths(40, 10), Lengths(30, 10)), 1, 1)
    assert length_load(requests, LengthLimits(200, max_prompt_len=40)).dropped == 1
    with pytest.raises(ConfigError, match="no request of the trace fits 8 tokens"):
        length_load(requests, LengthLimits(8))


def test_the_highest_rate_is_the_last_within_the_bound() -> None:
    assert highest_rate(lambda rate: rate, 10.0, 4.0) == pytest.approx(4.0, abs=0.1)
    assert highest_rate(lambda rate: 100.0, 10.0, 4.0) == 0.0
