"""Requests with several branches, one behaviour at a time. In any order and all at once: test_engine_machine.py."""

from __future__ import annotations

import pytest

from octavo.core.radix_node import GONE
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.seeds import branch_seed, derive_seed
from octavo.errors import CapacityError, InvalidRequestError
from tests.core.core_harness import Harness

PROMPT = [0, 1, 2, 1, 0, 0, 1, 2, 2, 1]  # two blocks of 4 and half a third


def refusal(harness: Harness, error: type[InvalidRequestError], prompt: list[int], **params: object) -> str:
    with pytest.raises(error) as caught:
        harness.core.add(Request("r", prompt, SamplingParams(**params), seed=0))  # type: ignore[arg-type]
    assert not harness.core.has_work
    return f"{caught.value.param}: {caught.value}"


# -- seeds


def test_the_first_branch_draws_as_the_request_alone_would() -> None:
    assert branch_seed(5, 0) == 5
    seeds = [branch_seed(5, branch) for branch in range(1000)]
    assert len(set(seeds)) == 1000
    assert not set(seeds[1:]) & {derive_seed(5, index) for index in range(1000)}
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_branch_seeds_are_what_they_were() -> None:
    """Written down: a change would change what users get for a seed."""
    assert [branch_seed(42, branch) for branch in (1, 2)] == SEEDS_OF_42


SEEDS_OF_42 = [626178720486552331, 847945950409407966]


# -- samples


def test_the_prompt_is_computed_once_and_drawn_from_by_all() -> None:
    harness = Harness(num_blocks=40, seats=4)
    harness.add_branches(PROMPT, 6, width=4)
    outputs = harness.step()
    (row,) = harness.executor.plans[0].rows
    assert len(row.token_ids) == 10
    assert [branch.request_id for branch in row.branch_samples] == ["r0#1", "r0#2", "r0#3"]
    assert [(output.request_id, output.branch, output.open_branches) for output in outputs] == [
        ("r0", branch, 4) for branch in range(4)
    ]
    assert {output.num_prompt_tokens for output in outputs} == {10}
    tables = [request.block_tables[0].tolist() for request in harness.scheduler.running]
    assert tables == [tables[0]] * 4, "not even the unfilled block is copied before somebody writes"
    harness.step()
    assert harness.core.status().copies == 3, "the last one writes in place"
    tables = [request.block_tables[0].tolist() for request in harness.scheduler.running]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 4
    harness.empty()


def test_a_branch_that_ends_leaves_the_others() -> None:
    harness = Harness(num_blocks=40)
    harness.add_branches(PROMPT, 8, width=3)
    harness.step()
    harness.end("r0#1", as_stop=True)
    outputs = harness.step()
    assert [(one.branch, one.finish_reason, one.open_branches) for one in outputs] == [
        (1, "stop", 2),
        (0, None, 2),
        (2, None, 2),
    ]
    harness.empty()


def test_an_abort_ends_all() -> None:
    harness = Harness(num_blocks=40)
    harness.add_branches(PROMPT, 8, width=3)
    harness.step()
    harness.end("r0")
    assert harness.core.status().used_blocks == 0
    assert [(one.branch, one.finish_reason, one.open_branches) for one in harness.step()] == [
        (0, "abort", 2),
        (1, "abort", 1),
        (2, "abort", 0),
    ]


def test_a_branch_takes_over_when_the_one_that_computes_the_prompt_ends() -> None:
    harness = Harness(num_blocks=40, budget=4, seats=4)
    harness.add_branches(PROMPT, 8, width=3)
    harness.step()
    harness.end("r0", as_stop=True)
    harness.step()
    row = harness.executor.plans[-1].rows[0]
    assert (row.request_id, row.start) == ("r0#1", 4), "what was computed is not lost"
    harness.empty()


def test_a_failure_ends_all() -> None:
    harness = Harness(num_blocks=40)
    harness.add_branches(PROMPT, 8, width=3)
    harness.step()
    harness.executor.fail_next["r0#2"] = "told to fail"
    assert {(one.finish_reason, one.error) for one in harness.step() if one.finish_reason} == {
        ("error", "told to fail")
    }
    assert harness.core.status().used_blocks == 0
    harness.empty()


def test_all_branches_are_preempted_together_and_share_again() -> None:
    harness = Harness(block_size=4, num_blocks=16, seats=4, prefix_caching=False)
    harness.add([2] * 8, 24)
    harness.add_branches(PROMPT, 14, width=3)
    for _ in range(30):
        if not harness.num_preempted:
            harness.step()
    plan = next(plan for plan in harness.executor.plans if plan.preempted)
    assert plan.preempted == ("r1",)
    assert [request.request_id for request in harness.scheduler.running] == ["r0"]
    num_before = len(harness.executor.plans)
    harness.empty()
    rows = [row for plan in harness.executor.plans[num_before:] for row in plan.rows if row.request_id != "r0"]
    recomputed = sum(len(row.token_ids) for row in rows if row.start < len(PROMPT))
    assert len(PROMPT) <= recomputed < 2 * len(PROMPT), (
        "without a cache too the prompt is computed once again, not thrice"
    )


def test_seats_are_kept_for_all_branches() -> None:
    harness = Harness(num_blocks=60, budget=4, seats=4)
    harness.add_branches(PROMPT, 8, width=3)
    harness.add(PROMPT[:3], 2)
    harness.add(PROMPT[:3], 2)
    harness.step()
    assert harness.scheduler._running.num_seats == 3, "two are still to join, and take their seats now"
    harness.empty()


def test_a_request_waits_until_there_are_seats_for_all_its_branches() -> None:
    harness = Harness(num_blocks=60, seats=4)
    harness.add(PROMPT, 3)
    harness.add_branches(PROMPT, 8, width=4)
    harness.add([1], 3)
    harness.step()
    assert {row.request_id for row in harness.executor.plans[-1].rows} == {"r0"}, "nobody passes it"
    harness.empty()


# -- searches


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 3)])
def test_a_search_shares_what_its_beams_have_in_common(windows: tuple[int | None, ...]) -> None:
    harness = Harness(block_size=2, num_blocks=60, vocab_size=12, windows=windows)
    harness.add_branches(PROMPT, 10, width=4, use_beam_search=True, n=2)
    peak = 0
    harness.step()
    while harness.core.has_work:
        for memory in harness.core.branch_memory():
            held = [b for table in memory.tables for blocks in table.block_ids for b in blocks if b != GONE]
            assert memory.blocks == len(set(held))
            assert memory.sharing.saved_blocks == len(held) - len(set(held))
            peak = max(peak, memory.sharing.saved_blocks)
            for table in memory.tables:
                others = {b for other in memory.tables if other is not table for b in other.block_ids[0]}
                if windows == (None,):  # behind a window, what one still holds another may have given up
                    assert set(table.block_ids[0][: table.num_shared]) <= others
                assert not set(table.block_ids[0][table.num_shared :]) & (others - {GONE})
        outputs = harness.step()
    assert [(one.branch, one.open_branches) for one in outputs] == [(0, 1), (1, 0)]
    assert outputs[0].score is not None
    assert outputs[0].score >= outputs[1].score
    assert outputs[1].sharing is not None
    assert outputs[1].sharing.peak_saved_blocks == harness.core.status().branch_peak_saved_blocks >= peak > 0
    assert outputs[1].num_generated_tokens == 4 * 10
    assert harness.core.branch_memory() == ()


def test_dropped_beams_are_free_at_once() -> None:
    harness = Harness(block_size=2, num_blocks=60, vocab_size=12, prefix_caching=False)
    harness.add_branches(PROMPT, 10, width=4, use_beam_search=True)
    while harness.core.has_work:
        harness.step()
        tables = [request.block_tables[0] for request in harness.scheduler.running]
        assert harness.core.status().used_blocks == len({block for table in tables for block in table})
        assert len(tables) in (0, 4)


# -- refusals


def test_more_branches_than_seats() -> None:
    message = refusal(Harness(seats=4), CapacityError, PROMPT, n=5)
    assert message == (
        "n: n is 5, but at most 4 requests run at once and each branch is one; lower n or raise --max-num-seqs"
    )


def test_branches_that_can_never_fit() -> None:
    harness = Harness(block_size=4, num_blocks=13)
    message = refusal(harness, CapacityError, PROMPT, n=4, max_tokens=8)
    assert message == (
        "n: prompt of 10 tokens + 4 branches x max_tokens 8 need 2 shared KV blocks + 4 x 3 = 14 (17 tokens to keep in "
        "each branch, 4 a block, 1 KV groups), the pool has 13; lower n or max_tokens, shorten the prompt or raise "
        "--kv-cache-memory"
    )
    harness.add_branches(PROMPT, 8, width=3)
    harness.empty()


def test_a_search_needs_tokens_to_choose_from() -> None:
    message = refusal(Harness(), InvalidRequestError, PROMPT, best_of=2, use_beam_search=True)
    assert "looks at 4 next tokens, the model has 3" in message


def test_ids_of_branches_are_taken() -> None:
    harness = Harness(num_blocks=40)
    harness.add_branches(PROMPT, 4, width=2)
    for taken in ("r0", "r0#1"):
        with pytest.raises(InvalidRequestError, match="in use"):
            harness.core.add(Request(taken, [1], SamplingParams(), seed=0))
    harness.empty()


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "top_p": 0.9}, "top_p"),
        ({"use_beam_search": True, "top_k": 5}, "top_k"),
        ({"use_beam_search": True, "min_p": 0.1}, "min_p"),
        ({"use_beam_search": True, "stop": ("x",)}, "stop"),
        ({"use_beam_search": True, "logprobs": 1}, "logprobs"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True, "early_stopping": "maybe"}, "early_stopping"),
        ({"use_beam_search": True, "length_penalty": 6.0}, "length_penalty"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_parameters_that_contradict(params: dict, param: str) -> None:
    with pytest.raises(InvalidRequestError, match=param) as caught:
        SamplingParams(**params)
    assert caught.value.param == param


# -- scores of the prompt


@pytest.mark.parametrize("budget", [3, 64])
def test_every_token_of_the_prompt_is_scored_once(budget: int) -> None:
    """In chunks, and though all of it is cached."""
    harness = Harness(num_blocks=40, budget=budget, seats=2)
    harness.add(PROMPT, 1)
    harness.drain()
    harness.add(PROMPT, 2, prompt_logprobs=2)
    scores = []
    while harness.core.has_work:
        for output in harness.step():
            scores += [score.token_id for score in output.prompt_scores]
            assert output.num_cached_tokens == 0
    assert scores == PROMPT[1:]
    harness.empty()


def test_scores_go_on_after_a_preemption() -> None:
    harness = Harness(block_size=2, num_blocks=24, budget=5, seats=4)
    scores: list[int] = []
    prompt = [*PROMPT, *PROMPT, *PROMPT]
    harness.add([1, 2, 0], 22)
    for _ in range(8):
        harness.step()
    harness.add(prompt, 3, prompt_logprobs=0)
    scores += [score.token_id for output in harness.step() for score in output.prompt_scores]
    harness.add([0] * 20, 8, priority=-1)
    while harness.core.has_work:
        scores += [score.token_id for output in harness.step() for score in output.prompt_scores]
    assert harness.num_preempted
    assert scores == prompt[1:]
    harness.empty()
