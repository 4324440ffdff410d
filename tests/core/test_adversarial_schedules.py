"""Pools that hold little more than one request, lengths and priorities chosen to hurt: all end, nobody starves."""

from __future__ import annotations

import random

import pytest

from octavo.core.step import StepPlan, StepResult
from tests.core.core_harness import Harness
from tests.core.shadow import VOCAB_SIZE


class Adversary:
    """Sends requests of extreme lengths that share prefixes, at awkward moments, and watches each plan."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        seats, block_size, self.num_blocks = rng.randrange(1, 6), rng.choice([1, 2, 4]), rng.randrange(3, 14)
        self.harness = Harness(
            block_size=block_size,
            num_blocks=self.num_blocks,
            budget=seats + rng.randrange(12),
            seats=seats,
            windows=rng.choice([(None,), (None,), (None, None), (None, 3), (5,)]),
        )
        self.longest = self.num_blocks * block_size + 1  # the last token is never run
        self.shared = [[rng.randrange(VOCAB_SIZE) for _ in range(self.longest)] for _ in range(2)]
        self.judge, self.harness.execute = self.harness.execute, self.execute  # type: ignore[method-assign]
        self.num_steps = 0
        self.num_stood_still = 0

    def send(self) -> None:
        rng = self.rng
        num_prompt = rng.choice([1, 2, rng.randrange(1, self.longest), self.longest - 1])
        room = self.longest - num_prompt
        prompt = [*rng.choice(self.shared)[: num_prompt - 1], rng.randrange(VOCAB_SIZE)]
        max_tokens = rng.choice([1, room, rng.randrange(1, room + 1)])
        assert self.harness.add(prompt, max_tokens, priority=rng.choice([0, 0, 0, -1, 1, -3])) is not None

    def execute(self, plan: StepPlan) -> StepResult:
        """F15: who needs one token more gets it in this step, whose size the harness bounds.

        Not so only for who was preempted, and for who found no memory: then there is none, and it is not the first.
        """
        running, with_row = self.harness.scheduler.running, {row.request_id for row in plan.rows}
        for request in running:
            if len(request.token_ids) - request.num_computed_tokens == 1 and request.request_id not in with_row:
                self.num_stood_still += 1
                assert request is not running[0], "the first makes no progress"
                assert self.harness.blocks.reach(request) == request.num_computed_tokens, "it had memory and got no row"
        self.num_steps += 1
        return self.judge(plan)

    def run(self, num_requests: int) -> None:
        num_sent = 0
        while num_sent < num_requests or self.harness.core.has_work:
            if num_sent < num_requests and self.rng.random() < 0.4:
                self.send()
                num_sent += 1
            if self.harness.core.has_work:
                self.harness.step()
        self.harness.empty()
        computed = self.harness.core.status().computed_tokens
        # F14: what runs again is bounded, so there are not more steps than tokens to compute.
        assert self.num_steps <= computed + num_requests, f"{self.num_steps} steps for {computed} tokens"
        assert all(shadow.preemptions <= num_requests for shadow in self.harness.shadows.values())


def attack(seeds: range) -> None:
    preemptions = stood_still = 0
    for seed in seeds:
        adversary = Adversary(seed)
        adversary.run(adversary.rng.randrange(4, 14))
        preemptions += adversary.harness.core.status().preemptions
        stood_still += adversary.num_stood_still
    assert preemptions > len(seeds) // 4, "the pools are not tight"
    assert stood_still > 0, "memory never ran out"


def test_f14_f15_adversarial_schedules() -> None:
    attack(range(120))


@pytest.mark.large
def test_f14_f15_many_adversarial_schedules() -> None:
    attack(range(1000, 4000))
