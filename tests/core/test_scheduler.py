"""Order, budget, memory, waiting for a prefix, and ends in every state: one fault of FAULTS.md after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from octavo.core import events
from octavo.core.admission import LOOKS_AT_ONCE
from octavo.core.request import PRIORITY_STEP, Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import StepPlan, StepResult
from octavo.core.streaming import StreamingLLM
from octavo.errors import CapacityError, InvalidRequestError
from tests.core.core_harness import Harness
from tests.core.shadow import Shadow

SYSTEM = [1, 2] * 20  # a prompt that many share: ten blocks of four


def rows_of(harness: Harness) -> dict[str, tuple[int, int]]:
    """request id -> (start, number of tokens) of the last step."""
    return {row.request_id: (row.start, len(row.token_ids)) for row in harness.executor.plans[-1].rows}


def cached(harness: Harness, request_id: str) -> int:
    final = harness.shadows[request_id].final
    assert final is not None
    return final.num_cached_tokens


def waits_of(harness: Harness) -> list[tuple[str, int]]:
    """Who has waited for a prefix so far, and for how many blocks."""
    return [(event.request_id, event.num_blocks) for event in harness.events if isinstance(event, events.RequestWaits)]


def while_it_runs(harness: Harness, act: Callable[[], object]) -> None:
    """Do something between the plan of the next step and what comes of it."""
    execute = harness.execute

    def once(plan: StepPlan) -> StepResult:
        harness.execute = execute  # type: ignore[method-assign]
        result = execute(plan)
        act()
        return result

    harness.execute = once  # type: ignore[method-assign]


def end_now(harness: Harness, request_id: str, *, as_stop: bool = False) -> None:
    assert (harness.core.finish if as_stop else harness.core.abort)(request_id)
    assert not harness.core.abort(request_id), "a request was ended twice"
    del harness.unfinished[request_id]


# -- what can never be served


def test_f13_a_prompt_that_never_fits_the_pool_is_refused_with_the_arithmetic() -> None:
    harness = Harness(block_size=4, num_blocks=5)
    request = Request("r", [0] * 30, SamplingParams(max_tokens=4), seed=0)
    with pytest.raises(CapacityError, match=r"30 tokens \+ max_tokens 4 needs 9 KV blocks .* the pool has 5") as caught:
        harness.core.add(request)
    assert caught.value.param == "prompt"
    assert not harness.core.has_work


def test_f13_also_when_the_prompt_fits_and_prompt_and_output_do_not() -> None:
    harness = Harness(block_size=4, num_blocks=5)
    with pytest.raises(CapacityError, match=r"needs 6 KV blocks \(21 tokens to keep, .*the pool has 5") as caught:
        harness.core.add(Request("r", [0] * 10, SamplingParams(max_tokens=12), seed=0))
    assert caught.value.param == "max_tokens"
    assert harness.add([0] * 10, 11) is not None, "20 tokens to keep fill five blocks: the last one is never run"
    harness.empty()


@pytest.mark.parametrize(("num_prompt", "max_tokens", "param"), [(8, 3, "max_tokens"), (12, 1, "prompt")])
def test_f13_the_context_has_its_arithmetic_too(num_prompt: int, max_tokens: int, param: str) -> None:
    harness = Harness(context=10)
    total = num_prompt + max_tokens
    with pytest.raises(
        CapacityError, match=rf"{num_prompt} tokens \+ max_tokens {max_tokens} = {total} .*10"
    ) as caught:
        harness.core.add(Request("r", [0] * num_prompt, SamplingParams(max_tokens=max_tokens), seed=0))
    assert caught.value.param == param
    assert harness.add([0] * 8, 2) is not None
    harness.empty()


def test_ids_of_tokens_and_of_requests_are_checked() -> None:
    harness = Harness()
    with pytest.raises(InvalidRequestError, match="token id 3; ids of this model go from 0 to 2"):
        harness.core.add(Request("r", [0, 3], SamplingParams(), seed=0))
    harness.add([0])
    with pytest.raises(InvalidRequestError, match="'r0' is in use"):
        harness.core.add(Request("r0", [0], SamplingParams(), seed=0))
    harness.drain()
    harness.executor.expect("r0", [0])
    harness.shadows["r0"] = Shadow([0], SamplingParams(max_tokens=1), 0, (), "")
    harness.core.add(Request("r0", [0], SamplingParams(max_tokens=1), seed=0))
    assert [output.finish_reason for output in harness.core.step()] == ["length"]


# -- the cache (F16, F17)


def test_f16_a_fully_cached_prompt_runs_its_last_token_alone() -> None:
    harness = Harness(num_blocks=32)
    first = harness.add(SYSTEM, 1)
    harness.drain()
    again = harness.add(SYSTEM, 3)
    harness.step()
    assert rows_of(harness) == {again: (39, 1)}
    harness.drain()
    assert (cached(harness, first), cached(harness, again)) == (0, 39)
    assert harness.core.status().copies == 1
    harness.empty()


def test_f16_two_that_arrive_together_share_what_is_computed_once() -> None:
    harness = Harness(num_blocks=64, budget=100)
    first, second = harness.add([*SYSTEM, 0]), harness.add([*SYSTEM, 1])
    harness.step()
    assert list(rows_of(harness)) == [first], "not in the step that computes it"
    harness.step()
    assert rows_of(harness)[second] == (40, 1)
    harness.drain()
    assert (cached(harness, first), cached(harness, second)) == (0, 40)
    harness.empty()


def test_f16_f17_a_hit_after_preemption_is_neither_a_hit_nor_computed_again() -> None:
    """The blocks of the preempted one are still there: it finds them, and the ledger does not count them twice."""
    harness = Harness(block_size=2, num_blocks=10, budget=8, seats=2)
    one, two = harness.add([0, 0, 1, 1], 10), harness.add([2, 2, 1, 1], 10)
    harness.drain()
    status = harness.core.status()
    assert status.preemptions >= 1
    assert status.restored_tokens > 0
    assert status.hit_tokens == 0
    assert status.queries_tokens == 8
    assert status.computed_tokens == 2 * 13
    assert (cached(harness, one), cached(harness, two)) == (0, 0)
    harness.empty()


def test_f17_recomputed_tokens_are_no_hits() -> None:
    """Two long prompts take turns in a pool that cannot keep what the preempted one had."""
    harness = Harness(block_size=2, num_blocks=10, budget=8, seats=2, prefix_caching=False)
    harness.add([0, 0, 1, 1], 10)
    harness.add([2, 2, 1, 1], 10)
    harness.drain()
    status = harness.core.status()
    assert status.recomputed_tokens > 0
    assert (status.hit_tokens, status.restored_tokens, status.queries_tokens) == (0, 0, 0)
    assert status.computed_tokens == 2 * 13
    assert status.computed_tokens + status.recomputed_tokens == harness.executor.num_processed_tokens


def test_another_namespace_never_hits() -> None:
    harness = Harness(num_blocks=64)
    harness.add(SYSTEM, 1, namespace="a")
    harness.drain()
    other, same = harness.add(SYSTEM, 1, namespace="b"), harness.add(SYSTEM, 1, namespace="a")
    harness.drain()
    assert (cached(harness, other), cached(harness, same)) == (0, 39)
    harness.empty()


# -- waiting for a prefix


def test_32_users_who_arrive_together_compute_the_system_prompt_once() -> None:
    harness = Harness(num_blocks=200, budget=60, seats=32)
    ids = [harness.add([*SYSTEM, n // 27, n // 9 % 3, n // 3 % 3, n % 3, 0], 2) for n in range(32)]
    harness.drain()
    status = harness.core.status()
    own = 5 + 1  # what is not in the system prompt, and the first sampled token
    assert cached(harness, ids[0]) == 0
    assert all(cached(harness, request_id) >= 40 for request_id in ids[1:])
    assert status.computed_tokens <= 40 + 32 * own
    assert status.recomputed_tokens == 0
    waits = [event for event in harness.events if isinstance(event, events.RequestWaits)]
    assert {event.num_blocks for event in waits if event.computing_id == ids[0]} == {10}
    harness.empty()


def test_who_waits_starts_when_the_shared_part_is_there_not_when_the_other_has_finished() -> None:
    harness = Harness(num_blocks=64, budget=8, seats=4)
    slow, waiter = harness.add([*SYSTEM[:16], *[0] * 40], 2), harness.add([*SYSTEM[:16], 1, 2], 2)
    harness.step()
    harness.step()
    assert list(rows_of(harness)) == [slow]
    for _ in range(4):
        harness.step()
    assert harness.shadows[slow].num_run < 56
    harness.drain()
    assert cached(harness, waiter) == 16
    admitted = [event.request_id for event in harness.events if isinstance(event, events.RequestAdmitted)]
    assert admitted == [slow, waiter]
    harness.empty()


def test_others_behind_the_one_who_waits_may_start() -> None:
    harness = Harness(num_blocks=64, budget=50, seats=4)
    slow, waiter, other = harness.add([*SYSTEM, 0]), harness.add([*SYSTEM, 1]), harness.add([2, 2, 2])
    harness.step()
    assert list(rows_of(harness)) == [slow, other]
    assert harness.core.status().waiting == 1
    harness.drain()
    assert cached(harness, waiter) == 40
    harness.empty()


@pytest.mark.parametrize("end", ["abort", "finish", "fail"])
def test_a_wait_ends_with_the_one_who_computes(end: str) -> None:
    harness = Harness(num_blocks=64, budget=50)
    slow, waiter = harness.add([*SYSTEM, 0]), harness.add([*SYSTEM, 1])
    if end == "fail":
        harness.executor.fail_next[slow] = "told to fail"
    else:
        while_it_runs(harness, lambda: end_now(harness, slow, as_stop=end == "finish"))
    harness.step()
    assert waits_of(harness) == [(waiter, 10)]
    harness.step()
    assert rows_of(harness) == {waiter: (0, 41)}, "nothing was committed, so it computes all by itself"
    harness.drain()
    assert harness.shadows[slow].output == []
    harness.empty()


def test_who_is_behind_one_who_ends_in_the_middle_hits_what_was_committed() -> None:
    harness = Harness(num_blocks=64, budget=8)
    slow, behind = harness.add([*SYSTEM, 0]), harness.add([*SYSTEM, 1])
    harness.step()
    harness.end(slow)
    harness.step()
    assert list(rows_of(harness)) == [behind]
    harness.drain()
    assert cached(harness, behind) == 8
    harness.empty()


def test_a_wait_ends_when_the_one_who_computes_is_preempted() -> None:
    """An urgent request takes the memory of the one that computes; the one that waited goes on by itself."""
    harness = Harness(block_size=4, num_blocks=14, budget=4, seats=4)
    slow, waiter = harness.add([*SYSTEM[:20], 0], 20), harness.add([*SYSTEM[:20], 1], 2)
    harness.step()
    assert harness.core.status().waiting == 1
    urgent = harness.add([2] * 4, 40, priority=-1)
    harness.drain()
    assert harness.shadows[slow].final is not None
    assert harness.shadows[waiter].final is not None
    assert harness.shadows[urgent].preemptions == 0
    harness.empty()


def test_nobody_waits_for_less_than_a_block_more() -> None:
    harness = Harness(num_blocks=64, budget=50)
    one, two = harness.add([1, 2, 1, 0, 0], 1), harness.add([1, 2, 1, 2, 2], 1)
    three = harness.add([1, 2, 1, 0], 1)  # all of its first block is there soon, but the last token must run
    harness.step()
    assert list(rows_of(harness)) == [one, two, three]
    harness.empty()


def test_nobody_waits_for_one_who_comes_after_it() -> None:
    """A less urgent one must not hold up an urgent one."""
    harness = Harness(num_blocks=64, budget=12)
    slow = harness.add([*SYSTEM, 0])
    harness.step()
    urgent = harness.add([*SYSTEM, 1], priority=-1)
    harness.step()
    assert rows_of(harness)[slow] == (12, 12)
    harness.step()
    harness.step()
    harness.step()
    assert urgent in rows_of(harness)
    assert not [event for event in harness.events if isinstance(event, events.RequestWaits)]
    harness.empty()


def test_an_aborted_waiter_leaves_no_trace() -> None:
    harness = Harness(num_blocks=64, budget=50, seats=8)
    slow = harness.add([*SYSTEM, 0])
    waiters = [harness.add([*SYSTEM, 1, n]) for n in range(3)]
    while_it_runs(harness, lambda: [end_now(harness, waiter) for waiter in waiters[:2]])
    harness.step()
    assert waits_of(harness) == [(waiter, 10) for waiter in waiters]
    assert harness.core.status().waiting == 1
    harness.drain()
    assert cached(harness, waiters[2]) == 40
    assert cached(harness, slow) == 0
    harness.empty()


# -- order, budget, memory


def test_first_come_first_served_within_a_priority() -> None:
    harness = Harness(num_blocks=64, budget=4, seats=1)
    late = [harness.add([n % 3, 0], 1, priority=1) for n in range(3)]
    soon = [harness.add([n % 3, 1], 1) for n in range(3)]
    harness.drain()
    finished = [event.output.request_id for event in harness.events if isinstance(event, events.RequestFinished)]
    assert finished == [*soon, *late]


def test_the_less_urgent_are_not_overtaken_for_ever() -> None:
    """A level of priority is worth PRIORITY_STEP arrivals and not one more."""
    harness = Harness(num_blocks=64, budget=4, seats=1)
    harness.scheduler._num_arrivals = 5
    patient = harness.add([0], 1, priority=1)
    harness.scheduler._num_arrivals += PRIORITY_STEP - 2
    before = harness.add([1], 1)
    harness.scheduler._num_arrivals += 1
    behind = harness.add([2], 1)
    harness.drain()
    finished = [event.output.request_id for event in harness.events if isinstance(event, events.RequestFinished)]
    assert finished == [before, patient, behind]


def test_f15_a_long_prompt_holds_up_nobody() -> None:
    """Between two tokens of a running request at most max_num_batched_tokens tokens are scheduled."""
    budget, seats = 12, 4
    harness = Harness(num_blocks=300, budget=budget, seats=seats)
    talkers = [harness.add([n], 60) for n in range(3)]
    for _ in range(3):
        harness.step()
    for n in range(3):
        harness.add([n, 1, 2] * 60, 4)
    since = dict.fromkeys(talkers, 0)
    num_long = 0
    while any(talker in harness.unfinished for talker in talkers):
        plan_tokens = harness.num_plan_tokens
        told = {output.request_id for output in harness.step()}
        scheduled = harness.num_plan_tokens - plan_tokens
        num_long += scheduled > len(talkers)
        for talker in talkers:
            since[talker] += scheduled
            if talker in told:
                assert since[talker] <= budget, f"{talker} waited for {since[talker]} tokens"
                since[talker] = 0
            elif talker in harness.unfinished:
                pytest.fail(f"{talker} got no token in a step")
    assert num_long > 10, "no long prompt was prefilled meanwhile"
    harness.empty()


def test_a_prompt_that_is_alone_has_larger_steps() -> None:
    """Until another request is there, and again when it has gone."""
    harness = Harness(num_blocks=300, budget=12, more_alone=36, seats=4)

    def step() -> int:
        before = harness.num_plan_tokens
        harness.step()
        return harness.num_plan_tokens - before

    harness.add([1, 2] * 100, 4)
    assert [step(), step()] == [48, 48]
    harness.add([2, 1, 2], 2)  # waits, then decodes
    assert [step() for _ in range(3)] == [12, 12, 12]
    harness.drain()
    harness.add([0] * 100, 30)
    assert [step() for _ in range(4)] == [48, 48, 4, 1]
    harness.add([2] * 100, 1)
    assert step() == 12
    harness.drain()
    harness.empty()


@pytest.mark.parametrize(
    ("windows", "params"),
    [((4,), {}), ((None, 4), {}), ((None,), {"prompt_logprobs": 0}), ((None,), {"keep": StreamingLLM(4, 8, 4)})],
)
def test_larger_steps_only_where_they_take_no_more_memory(windows: tuple, params: dict) -> None:
    harness = Harness(num_blocks=300, budget=12, more_alone=36, windows=windows)
    harness.add([1] * 100, 4, **params)
    harness.step()
    assert harness.num_plan_tokens == 12
    harness.drain()


def test_larger_steps_also_not_for_branches() -> None:
    harness = Harness(num_blocks=300, budget=12, more_alone=36)
    harness.add_branches([1] * 100, 4, width=2)
    harness.step()
    assert harness.num_plan_tokens == 12
    harness.drain()


def test_f15_not_even_the_long_prompt_of_one_who_comes_before() -> None:
    """Decode goes first in every step, also before an urgent prompt that goes first in everything else."""
    harness = Harness(num_blocks=300, budget=12, seats=4)
    talkers = [harness.add([n], 60) for n in range(2)]
    harness.step()
    urgent = [harness.add([n, 1, 2] * 60, 1, priority=-1) for n in range(2)]
    for _ in range(20):
        told = {output.request_id for output in harness.step()}
        assert set(talkers) <= told
    assert harness.shadows[urgent[0]].num_run == 180, "no long prompt was prefilled meanwhile"
    harness.empty()


@pytest.mark.parametrize("windows", [(None,), (None, None), (None, 3), (4, 1)])
@pytest.mark.parametrize("num_blocks", range(6, 14))
def test_f14_tiny_pools_end(num_blocks: int, windows: tuple[int | None, ...]) -> None:
    """Everybody needs nearly the whole pool; the first always progresses (the harness asserts it at each step)."""
    harness = Harness(block_size=2, num_blocks=num_blocks, budget=5, seats=5, windows=windows)
    most = num_blocks * 2 + 1
    for n in range(6):
        num_prompt = 1 + (n * 5) % (most - 2)
        assert harness.add([n % 3] * num_prompt, most - num_prompt, priority=n % 2) is not None
    harness.drain(max_steps=6 * most * 4)
    harness.empty()


def test_f14_preemption_does_not_become_a_ping_pong() -> None:
    """Each is preempted at most once for each end of another: who was preempted waits until all of it fits."""
    harness = Harness(block_size=2, num_blocks=12, budget=8, seats=4)
    ids = [harness.add([n % 3, n // 3], 16) for n in range(6)]
    harness.drain()
    assert harness.core.status().preemptions > 0
    assert all(harness.shadows[request_id].preemptions <= len(ids) for request_id in ids)
    assert harness.core.status().preemptions <= 12
    harness.empty()


def test_a_blocked_head_is_looked_at_only_when_something_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work of a step does not grow with what waits."""
    harness = Harness(block_size=2, num_blocks=12, budget=20, seats=4)
    harness.add([0] * 6, 16)
    harness.step()
    harness.add([1] * 20, 2)
    looked = []
    find_prefix = harness.blocks.find_prefix
    monkeypatch.setattr(harness.blocks, "find_prefix", lambda request: looked.append(request) or find_prefix(request))
    for _ in range(10):
        harness.step()
    assert len(looked) == 1
    harness.empty()


def test_a_crowd_that_waits_for_a_prefix_costs_a_step_only_so_many_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(num_blocks=400, budget=200, seats=8)
    prompt = [0, *SYSTEM * 4]
    looked: list[Request] = []
    find_prefix = harness.blocks.find_prefix
    monkeypatch.setattr(harness.blocks, "find_prefix", lambda request: looked.append(request) or find_prefix(request))
    for n in range(150):
        harness.add([*prompt, n % 3], 1)
    looks = []
    while harness.core.has_work:
        looked.clear()
        harness.step()
        looks.append(len(looked))
    assert looks[0] == 1 + LOOKS_AT_ONCE
    assert sum(looks) == 150 + LOOKS_AT_ONCE, "who waited is looked at twice, the others once"
    assert harness.core.status().hit_tokens >= 149 * 160
    harness.empty()


def test_everything_is_computed_again_without_a_kv_cache() -> None:
    """The same text, chunked as ever, and the ledger says what it costs."""
    harness = Harness(block_size=4, num_blocks=16, budget=6, seats=2, kv_cache=False)
    request_id = harness.add([0, 1, 2, 0, 1, 2, 2, 1], 4)
    harness.drain()
    status = harness.core.status()
    assert status.computed_tokens == 8 + 3
    assert status.recomputed_tokens == 8 + 9 + 10
    assert status.hit_tokens == 0
    assert cached(harness, request_id) == 0
    harness.empty()


def test_the_waste_is_what_running_requests_hold_and_have_not_filled() -> None:
    harness = Harness(block_size=4, num_blocks=32, budget=16, seats=4)
    for count in (5, 4, 2):
        harness.add([count % 3] * count, 6)
    assert harness.core.status().internal_waste_tokens == 0
    harness.step()
    assert harness.core.status().internal_waste_tokens == 3 + 0 + 2
    harness.step()
    assert harness.core.status().internal_waste_tokens == 2 + 3 + 1
    harness.empty()


# -- ends


@pytest.mark.parametrize(
    "state", ["queued", "behind its prefix", "waits for a prefix", "prefill", "its step runs", "decode", "preempted"]
)
@pytest.mark.parametrize("as_stop", [False, True])
def test_f11_an_abort_in_any_state_frees_at_once(state: str, as_stop: bool) -> None:
    harness = Harness(block_size=2, num_blocks=12, budget=4, seats=2)
    if state == "queued":
        victim = harness.add([0] * 5)
    elif state == "behind its prefix":
        harness.add([0] * 8)
        victim = harness.add([*[0] * 7, 1])
        harness.step()
        assert harness.core.status().waiting == 1
    elif state in ("waits for a prefix", "its step runs"):
        first, second = harness.add([0, 0, 0]), harness.add([0, 0, 1])
        victim = first if state == "its step runs" else second
        while_it_runs(harness, lambda: end_now(harness, victim, as_stop=as_stop))
        harness.step()
        assert waits_of(harness) == [(second, 1)]
    elif state == "prefill":
        victim = harness.add([0] * 12)
        harness.step()
        assert 0 < harness.shadows[victim].num_run < 12
    elif state == "decode":
        victim = harness.add([0] * 3)
        harness.step()
        assert harness.shadows[victim].output
    else:
        harness.add([0, 0], 16)
        victim = harness.add([1, 1], 16)
        while not harness.shadows[victim].preemptions:
            harness.step()
    if victim in harness.unfinished:
        harness.end(victim, as_stop=as_stop)
    assert victim not in {request.request_id for request in harness.scheduler.running}
    harness.step()
    final = harness.shadows[victim].final
    assert final is not None
    assert (final.finish_reason, final.token) == ("stop" if as_stop else "abort", None)
    harness.empty()


def test_unknown_requests_cannot_be_ended() -> None:
    harness = Harness()
    assert not harness.core.abort("nobody")
    assert not harness.core.finish("nobody")
    assert not harness.core.has_work


def test_a_failed_row_ends_its_request_and_no_other() -> None:
    harness = Harness(num_blocks=32, budget=32)
    bad, good = harness.add([0] * 9, 5), harness.add([1] * 9, 5)
    harness.executor.fail_next[bad] = "not a number"
    outputs = {output.request_id: output for output in harness.step()}
    assert (outputs[bad].finish_reason, outputs[bad].error) == ("error", "not a number")
    assert outputs[good].finish_reason is None
    again = harness.add([0] * 9, 5)
    harness.drain()
    assert cached(harness, again) == 0, "what a failed row computed is not kept"
    assert harness.core.status().failed_tokens == 9
    harness.empty()


def test_when_a_step_raises_all_can_be_ended_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(num_blocks=32, budget=10)
    ids = [harness.add([*SYSTEM[:12], n], 5) for n in range(3)]
    harness.step()
    with monkeypatch.context() as patch:
        patch.setattr(harness.executor, "execute", lambda plan: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            harness.step()
    outputs = harness.core.fail_all("the kernels stopped")
    assert {output.request_id for output in outputs} == set(ids)
    assert {(output.finish_reason, output.error) for output in outputs} == {("error", "the kernels stopped")}
    assert not harness.core.has_work
    status = harness.core.status()
    assert (status.used_blocks, status.running, status.waiting) == (0, 0, 0)
    assert harness.core.fail_all("again") == []


@pytest.mark.parametrize("num_rows_done", [0, 1, 3])
def test_f4_a_step_that_broke_off_poisons_nothing(num_rows_done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows of the step were written, some were not: whoever comes later gets its own text, hits included."""
    harness = Harness(block_size=4, num_blocks=32, budget=24, seats=4)
    for n in range(3):
        harness.add([*SYSTEM[:12], n, n, n], 6)
    for _ in range(2):
        harness.step()
    broken: list[StepPlan] = []

    def breaks(plan: StepPlan) -> StepResult:
        broken.append(plan)
        harness.executor.execute(replace(plan, rows=plan.rows[:num_rows_done]))
        raise RuntimeError("the kernels stopped")

    with monkeypatch.context() as patch:
        patch.setattr(harness, "execute", breaks)
        with pytest.raises(RuntimeError, match="the kernels stopped"):
            harness.core.step()
    assert len(broken[0].rows) == 3
    for output in harness.core.fail_all("the kernels stopped"):
        harness.shadows[output.request_id].final = output
        del harness.unfinished[output.request_id]
    harness.check_structure()
    again = [
        harness.core.add(Request(f"again {n}", [*SYSTEM[:12], n, n, n], SamplingParams(max_tokens=6), seed=7))
        for n in range(3)
    ]
    assert len(again) == 3
    texts: dict[str, list[int]] = {}
    finals = []
    while harness.core.has_work:
        plan = harness.scheduler.schedule()
        result = harness.executor.execute(plan)  # it believes nothing: every slot that is read is checked
        for output in harness.scheduler.update(plan, result):
            assert output.token is not None
            texts.setdefault(output.request_id, []).append(output.token.token_id)
            if output.finish_reason is not None:
                finals.append(output)
    for n in range(3):
        shadow = Shadow([*SYSTEM[:12], n, n, n], SamplingParams(max_tokens=6), 7, (), "")
        assert texts[f"again {n}"] == shadow.reference()[0]
    assert all(output.num_cached_tokens >= 12 for output in finals), "what was committed before is still hit"
    assert harness.core.status().used_blocks == 0


# -- stops


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_end_of_sequence_and_stop_tokens(min_tokens: int) -> None:
    harness = Harness(num_blocks=64, budget=32)
    for prompt in ([0], [1], [2], [0, 1], [1, 1]):
        harness.add(prompt, 30, eos=(0,), min_tokens=min_tokens)
        harness.add(prompt, 30, stop_token_ids=(1,), min_tokens=min_tokens)
        harness.add(prompt, 30, eos=(0, 1), ignore_eos=True, min_tokens=min_tokens)
    harness.drain()
    for request_id, shadow in harness.shadows.items():
        final = shadow.final
        assert final is not None
        ending = set(shadow.params.stop_token_ids) or (set() if shadow.params.ignore_eos else {0})
        assert not ending & set(shadow.output[:-1])
        if final.finish_reason == "stop":
            assert final.stop_reason == shadow.output[-1], request_id
            assert final.stop_reason in ending
            assert len(shadow.output) > min_tokens
        else:
            assert (final.finish_reason, final.stop_reason, len(shadow.output)) == ("length", None, 30)
    assert {shadow.final.finish_reason for shadow in harness.shadows.values() if shadow.final} == {"stop", "length"}
    harness.empty()


# -- branches


def test_a_branch_shares_and_goes_its_own_way() -> None:
    harness = Harness(num_blocks=32, budget=16)
    parent = harness.add([0, 1, 2, 0, 1, 2], 8)
    for _ in range(2):
        harness.step()
    used = harness.core.status().used_blocks
    child = harness.fork(parent, 8)
    assert harness.core.status().used_blocks == used
    harness.drain()
    assert harness.core.status().copies == 1
    parent_output, child_output = harness.shadows[parent].output, harness.shadows[child].output
    assert parent_output[:2] == child_output[:2]
    assert len(child_output) == 8
    harness.empty()


def test_a_branch_without_a_seat_waits_and_hits() -> None:
    harness = Harness(num_blocks=32, budget=16, seats=1)
    parent = harness.add([0, 1, 2, 0, 1, 2, 1, 1, 0], 4)
    harness.step()
    child = harness.fork(parent, 4)
    assert harness.core.status().waiting == 1
    harness.drain()
    assert cached(harness, child) > 0
    harness.empty()
