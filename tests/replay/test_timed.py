"""Timed replay: the engine's own core in virtual time. Counts against what is known, and the other modes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from octavo.core.config import SchedulerConfig
from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.core.step import StepPlan, StepResult
from octavo.errors import ConfigError
from octavo.replay.allocators import Lengths, Paged
from octavo.replay.batching import Batching, BatchLimits
from octavo.replay.cost_model import CostModel, StepWork, roofline, work_of
from octavo.replay.hardware import find_hardware
from octavo.replay.model_shape import shape_of
from octavo.replay.policies import policy_named
from octavo.replay.quantiles import Quantiles
from octavo.replay.sim_executor import SimExecutor, VirtualClock
from octavo.replay.timed import MAX_SAMPLES, TimedConfig, TimedReplay, TimedReport
from octavo.replay.trace import TraceRequest, token_array
from octavo.replay.trace_tokens import prompt_tokens
from octavo.testing.checking_executor import CheckingExecutor

ONE_SECOND = CostModel("one second", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
SPEC = KVSpec((KVGroupSpec("full", (0,), 1, 16, "bf16"),), 4)


def timed(
    requests: list[TraceRequest], *, num_blocks: int = 64, cost: CostModel = ONE_SECOND, **scheduler: object
) -> TimedReport:
    given = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, **scheduler}
    config = TimedConfig(SchedulerConfig(**given), SPEC, num_blocks)  # type: ignore[arg-type]
    return TimedReplay(config, cost).run(requests)


def lengths(prompt: int, output: int, at: float = 0.0) -> TraceRequest:
    return TraceRequest(at, prompt, output)


def test_a_request_alone() -> None:
    report = timed([lengths(10, 5, at=100.0)])
    assert (report.requests, report.duration_s, report.status.steps) == (1, 5.0, 5)
    assert report.ttft_s.quantile(0.5) == pytest.approx(1.0, rel=0.01)
    assert report.itl_s.count == 4
    assert report.e2e_s.largest == 5.0
    assert report.output_tokens_per_s == 1.0


def test_a_long_prompt_runs_in_chunks() -> None:
    assert timed([lengths(150, 1)]).duration_s == 3.0, "64 tokens a step"


def test_requests_wait_for_a_seat_and_for_their_time() -> None:
    report = timed([lengths(4, 3), lengths(4, 3), lengths(4, 3, at=50.0)], max_num_seqs=1)
    assert (report.queue_max, report.running_max, report.duration_s) == (1, 1, 53.0)
    assert report.ttft_s.largest == 4.0
    assert report.queue_mean_s == pytest.approx(1.0), "three seconds of one request, over three requests"


def test_arrivals_can_be_faster() -> None:
    config = TimedConfig(SchedulerConfig(8, 64, 256), SPEC, 64, speed=10.0)
    assert TimedReplay(config, ONE_SECOND).run([lengths(4, 1), lengths(4, 1, at=50.0)]).duration_s == 6.0


def test_the_same_prompt_comes_from_the_cache() -> None:
    ids = [1, 2, 3]
    requests = [TraceRequest(float(9 * at), 12, 1, ids, 4) for at in range(3)]
    report = timed(requests)
    assert (report.status.prompt_tokens, report.status.hit_tokens) == (36, 2 * 11), "the last token always runs"
    other = [TraceRequest(float(9 * at), 12, 1, ids, 4, namespace=str(at)) for at in range(3)]
    assert timed(other).status.hit_tokens == 0


def test_answers_that_are_known_are_found_by_the_next_turn() -> None:
    first = TraceRequest(0.0, 8, 9, (), 0, token_array(range(8)), token_array(range(50, 59)))
    said = [*range(8), *range(50, 59)]
    second = TraceRequest(99.0, 18, 1, (), 0, token_array([*said, 7]))
    assert timed([first, second]).status.hit_tokens == 16, "of 17 tokens that were said 16 were computed"


def test_what_can_never_fit_is_refused_with_the_reason() -> None:
    report = timed([lengths(300, 5), lengths(4, 1), lengths(200, 50)], num_blocks=8)
    assert (report.requests, report.refused) == (1, 2)
    assert "context of 256 tokens" in report.refused_reasons[0]
    assert "needs 63 KV blocks" in report.refused_reasons[1]


def test_a_full_pool_preempts_and_everything_ends() -> None:
    report = timed([lengths(8, 40) for _ in range(6)], num_blocks=24)
    assert report.requests == 6
    assert report.status.preemptions > 0
    assert report.status.generation_tokens == 240
    assert report.status.processed_tokens == report.status.computed_tokens + report.status.recomputed_tokens


def test_the_occupancy_is_thinned_out() -> None:
    report = timed([lengths(4, 100, at=90.0 * at) for at in range(20)])
    assert 50 < len(report.occupancy) <= MAX_SAMPLES
    times = [one.time_s for one in report.occupancy]
    assert times == sorted(times)
    assert max(one.used_blocks for one in report.occupancy) <= 64


def test_the_simulated_executor_counts_as_the_checking_one_does() -> None:
    """The plans of a load with hits, copies and preemptions pass the checks of the executor that believes nothing."""

    class Both:
        def __init__(self, clock: VirtualClock) -> None:
            self.checking = CheckingExecutor(4, vocab_size=7, keep_plans=False)
            self.simulated = SimExecutor(ONE_SECOND, clock)

        def execute(self, plan: StepPlan) -> StepResult:
            ours, theirs = self.simulated.execute(plan), self.checking.execute(plan)
            assert ours.num_tokens == theirs.num_tokens
            assert ours.sampled.keys() == theirs.sampled.keys()
            return theirs

    chance = random.Random(1)
    replay = TimedReplay(TimedConfig(SchedulerConfig(6, 32, 256), SPEC, 30, may_coast=False), ONE_SECOND)
    both = Both(replay._clock)
    replay.core._executor = both
    trace = []
    for at in range(60):
        text = [chance.randrange(3) for _ in range(chance.randrange(1, 40))]
        trace.append(TraceRequest(0.5 * at, len(text), chance.randrange(1, 30), (), 0, token_array(text)))
    report = replay.run(trace)
    assert report.requests == 60
    assert report.status.preemptions > 0
    assert report.status.hit_tokens > 0
    assert both.checking.num_processed_tokens == report.status.processed_tokens == both.simulated.num_tokens


def test_lengths_alone_batch_as_the_allocators_mode_says() -> None:
    """Two simulators that share no code but the cost model: the scheduler, and the counting of blocks."""
    chance = random.Random(5)
    load = [Lengths(chance.randrange(1, 60), chance.randrange(1, 60)) for _ in range(150)]
    cost = CostModel("some", 0.01, 1e-4, 0.0, 0.0, 1e-6, 0.0, 1e-3)
    counted = Batching(Paged(4 * 100, 4, spare_per_request=1), cost, BatchLimits(64)).run(load)
    requests = [lengths(one.prompt, one.output) for one in load]
    config = TimedConfig(SchedulerConfig(64, 100_000, 256, enable_prefix_caching=False), SPEC, 100)
    report = TimedReplay(config, cost).run(requests)
    assert report.status.generation_tokens == counted.output_tokens
    assert report.duration_s == pytest.approx(counted.duration_s, rel=0.03)
    assert report.running_max == pytest.approx(counted.max_concurrency, rel=0.1)


def test_policies_keep_every_rule_of_the_core() -> None:
    """LFU under a load that evicts: the tree lets no block go before those below it (asserted in the core)."""
    chance = random.Random(2)
    trace = []
    for at in range(400):
        ids = [chance.choice((1, 2)), *[chance.randrange(3, 9) for _ in range(chance.randrange(6))]]
        names = [tuple(ids[: n + 1]) for n in range(len(ids))]
        urgency = chance.randrange(-1, 2)
        trace.append(TraceRequest(float(at), 4 * len(names) + 2, chance.randrange(1, 9), names, 4, priority=urgency))
    hits = {}
    for name in ("lru", "lfu", "priority"):
        policy, listener = policy_named(name, 40)
        replay = TimedReplay(TimedConfig(SchedulerConfig(4, 64, 256), SPEC, 40), ONE_SECOND, policy)
        if listener is not None:
            replay.core.add_listener(listener)
        report = replay.run(trace)
        assert report.requests == 400
        assert report.status.evicted_blocks > 100
        assert report.status.free_blocks + report.status.cached_blocks == 40
        hits[name] = report.status.hit_tokens
    assert len(set(hits.values())) == 3


def test_tokens_stand_for_names() -> None:
    one = TraceRequest(0.0, 10, 1, ["a", "b", "c"], 4)
    other = TraceRequest(0.0, 12, 1, ["a", "x", "y"], 4)
    first, second = prompt_tokens(one, 0), prompt_tokens(other, 1)
    assert (len(first), len(second)) == (10, 12)
    assert first[:4] == second[:4]
    assert first[4] != second[4]
    assert prompt_tokens(TraceRequest(0.0, 6, 1, [1], 4), 9).tolist() == [1, 1, 1, 1, 9, 9], (
        "of the rest nothing is known"
    )
    assert prompt_tokens(TraceRequest(0.0, 3, 1), 5).tolist() == [5, 5, 5]


def test_the_work_of_a_step() -> None:
    """A prompt of 3 tokens behind 5, and a token behind 9: pairs are 6 + 7 + 8, and 10."""
    assert work_of([(5, 3, False), (9, 1, True)]) == StepWork(4, 1, 18, 31)


def test_the_roofline_of_a_known_machine() -> None:
    """Llama-3.1-8B on an H100: 7.0e9 numbers of the layers' matrices in bf16, read once a step."""
    shape, hardware = shape_of("llama-3.1-8b"), find_hardware("H100")
    cost = roofline(shape, hardware, 131_072)
    assert shape.layer_parameters == 6_979_321_856
    assert cost.weights_s == pytest.approx(2 * 6_979_321_856 / (3350e9 * 0.85))
    one, many = cost.step_s(StepWork(1, 1, 100, 100)), cost.step_s(StepWork(64, 64, 6400, 6400))
    assert one < many < 1.2 * one, "up to many rows the weights are what takes the time"
    assert cost.step_s(StepWork(4096, 1, 4096, 4096 * 2048)) > 4 * one
    assert cost.step_s(StepWork()) == 0.0
    assert roofline(shape, hardware, 131_072, 4).weights_s == pytest.approx(cost.weights_s / 4)
    whole = cost.prefill_s(8192)
    assert cost.prefill_s(8192, start=4096) < whole < 2 * cost.prefill_s(8192, start=4096), "the second half reads more"


def test_a_machine_may_be_named_with_its_memory() -> None:
    assert find_hardware("RTX4090-24GB") is find_hardware("rtx4090")
    assert find_hardware("H100-80GB") is find_hardware("H100")
    assert find_hardware("A100-40GB") is not find_hardware("A100-80GB")
    assert find_hardware("h100 nvl") is find_hardware("H100-NVL-94GB")
    assert find_hardware("l4").name == "L4-24GB", "not the L40S"
    for name in ("H100-40GB", "abacus", "", "-80GB"):
        with pytest.raises(ConfigError, match="is not in the catalogue"):
            find_hardware(name)
    with pytest.raises(ConfigError, match="did you mean A100-40GB, A100-80GB"):
        find_hardware("A100")


def test_quantiles_are_within_a_percent() -> None:
    chance = random.Random(0)
    numbers = [chance.lognormvariate(0, 2) for _ in range(5000)]
    found = Quantiles()
    for number in numbers:
        found.add(number)
    for share in (0.5, 0.9, 0.99):
        exact = sorted(numbers)[round(share * 5000) - 1]
        assert found.quantile(share) == pytest.approx(exact, rel=0.012)
    assert found.mean == pytest.approx(sum(numbers) / 5000)
    assert Quantiles().summary() == dict.fromkeys(("p50", "p90", "p95", "p99", "mean", "max"), 0.0)


def test_memory_holds_what_is_open_only() -> None:
    replay = TimedReplay(TimedConfig(SchedulerConfig(4, 64, 64), SPEC, 40), ONE_SECOND)
    most: Counter[str] = Counter()

    def trace() -> object:
        for at in range(3000):
            most["open"] = max(most["open"], len(replay._open))
            most["told"] = max(most["told"], len(replay._executor._invented))
            yield lengths(4, 2, at=float(5 * at))

    assert replay.run(trace()).requests == 3000  # type: ignore[arg-type]
    assert most["open"] < 8
    assert most["told"] < 8


@pytest.mark.parametrize("num_blocks", [40, 400])
def test_rows_that_are_left_out_change_no_time_and_no_event(num_blocks: int) -> None:
    """A load with hits, waits, preemptions, answers that are known in part and arrivals at any time."""
    cost = CostModel("some", 0.01, 1e-4, 1e-3, 1e-4, 1e-5, 1e-6, 1e-3)
    chance, trace, now = random.Random(num_blocks), [], 0.0
    for at in range(300):
        now += chance.choice((0.0, 0.01, 0.3))
        ids = [chance.choice((1, 2)), *[chance.randrange(3, 9) for _ in range(chance.randrange(6))]]
        names = [tuple(ids[: n + 1]) for n in range(len(ids))]
        known = token_array(range(7, 7 + chance.randrange(1, 20))) if at % 3 == 0 else None
        output = chance.randrange(1, 70)
        trace.append(TraceRequest(now, 4 * len(names) + chance.randrange(3), output, names, 4, output_token_ids=known))
    reports, events = [], []
    for may_coast in (True, False):
        config = TimedConfig(SchedulerConfig(12, 40, 256), SPEC, num_blocks, may_coast=may_coast)
        replay = TimedReplay(config, cost)
        told: list[object] = []
        replay.core.add_listener(lambda event, r=replay, to=told: to.append((r._clock.now_s, event)))
        reports.append(replay.run(trace))
        events.append(told)
    assert events[0] == events[1], "with the virtual time of each"
    with_, without = reports
    assert with_.status == without.status
    assert (with_.status.preemptions > 0) == (num_blocks == 40)
    for name in ("requests", "duration_s", "queue_max", "queue_mean_s", "running_max", "occupancy"):
        assert getattr(with_, name) == getattr(without, name)
    for name in ("ttft_s", "itl_s", "e2e_s"):
        ours, theirs = getattr(with_, name), getattr(without, name)
        assert ours._counts == theirs._counts
        assert ours.mean == pytest.approx(theirs.mean, rel=1e-12), "added up in another order"
        assert ours.largest == theirs.largest
