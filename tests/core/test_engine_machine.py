"""Whatever arrives, branches, fails or ends, in any order: plans stay sound, and every request gets its own text."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from octavo.core.heavy_hitters import HeavyHitters
from octavo.core.snap_kv import SnapKV
from octavo.core.streaming import StreamingLLM
from tests.core.core_harness import Harness
from tests.core.shadow import VOCAB_SIZE
from tests.core.storms import branch_storm, storm

TOKENS = st.integers(0, VOCAB_SIZE - 1)
# Prompts share prefixes: twins and tails that part inside a block are where caches break.
PROMPTS = st.one_of(
    st.builds(lambda shared, tail: [0] * shared + tail, st.integers(0, 20), st.lists(TOKENS, min_size=1, max_size=4)),
    st.builds(lambda shared, tail: [1, 2] * shared + tail, st.integers(0, 9), st.lists(TOKENS, min_size=1, max_size=4)),
    st.lists(TOKENS, min_size=1, max_size=20),
)

# Of each KV group: growing ones, windows smaller and larger than a block, in any order, with and without growing ones;
# 0 is a tail, of which only the block that fills is kept.
WINDOWS = [
    (None,),
    (None,),
    (None, None),
    (None, 5),
    (3, None),
    (None, 2, 9),
    (1, None),
    (6,),
    (2,),
    (4, 11),
    (None, 0),
    (None, 5, 0, 0),
    (6, 0),
]
SWITCHES = [(True, True, True)] * 4 + [(False, True, True), (True, False, True), (True, True, False)]


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4, 8]),
        num_blocks=st.integers(3, 16),
        seats=st.integers(1, 5),
        more_budget=st.integers(0, 16),
        more_alone=st.sampled_from([0, 0, 20]),
        windows=st.sampled_from(WINDOWS),
        switches=st.sampled_from(SWITCHES),
        vocab_size=st.sampled_from([VOCAB_SIZE, VOCAB_SIZE, 10]),  # a search needs some to choose from
    )
    def start(self, block_size, num_blocks, seats, more_budget, more_alone, windows, switches, vocab_size):
        prefix_caching, kv_cache, token_exact = switches
        self.harness = Harness(
            block_size=block_size,
            num_blocks=num_blocks,
            budget=seats + more_budget,
            more_alone=more_alone,
            seats=seats,
            windows=windows,
            prefix_caching=prefix_caching,
            kv_cache=kv_cache,
            token_exact=token_exact,
            vocab_size=vocab_size,
        )

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 10),
        width=st.integers(2, 4),
        eos=st.sampled_from([(), (0,)]),
        priority=st.sampled_from([0, 0, -1]),
        penalty=st.sampled_from([1.0, 1.0, 1.1]),
    )
    def add_samples(self, prompt, max_tokens, width, eos, priority, penalty):
        self.harness.add_branches(
            prompt, max_tokens, width=width, eos=eos, priority=priority, repetition_penalty=penalty
        )

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 10),
        width=st.integers(1, 4),
        eos=st.sampled_from([(), (0,)]),
        min_tokens=st.integers(0, 2),
        early_stopping=st.sampled_from([True, False, "never"]),
        length_penalty=st.sampled_from([1.0, 0.0, -1.0, 2.0]),
    )
    def add_search(self, prompt, max_tokens, width, eos, min_tokens, early_stopping, length_penalty):
        self.harness.add_branches(
            prompt,
            max_tokens,
            width=width,
            eos=eos,
            use_beam_search=True,
            n=(width + 1) // 2,
            min_tokens=min(min_tokens, max_tokens),
            early_stopping=early_stopping,
            length_penalty=length_penalty,
        )

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=3),
        max_tokens=st.integers(1, 10),
        min_tokens=st.integers(0, 3),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        namespace=st.sampled_from(["", "", "other"]),
        eos=st.sampled_from([(), (), (0,)]),
        penalty=st.sampled_from([1.0, 1.0, 1.1]),
    )
    def add(self, prompts, max_tokens, min_tokens, priority, namespace, eos, penalty):
        for prompt in prompts:
            self.harness.add(
                prompt,
                max_tokens,
                priority=priority,
                namespace=namespace,
                eos=eos,
                min_tokens=min(min_tokens, max_tokens),
                repetition_penalty=penalty,
            )

    @precondition(lambda self: all(window is None for window in self.harness.windows))
    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 30),
        keep=st.builds(StreamingLLM, st.integers(1, 5), st.integers(1, 9), st.integers(1, 5)),
        priority=st.sampled_from([0, 0, -1]),
    )
    def add_streaming(self, prompt, max_tokens, keep, priority):
        self.harness.add(prompt, max_tokens, keep=keep, priority=priority)

    @precondition(lambda self: all(window is None for window in self.harness.windows))
    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 30),
        recent=st.integers(1, 4),
        others=st.integers(1, 8),
        piece=st.integers(0, 5),
        priority=st.sampled_from([0, 0, -1]),
    )
    def add_choosing(self, prompt, max_tokens, recent, others, piece, priority):
        keep = HeavyHitters(recent + others, recent, piece) if piece else SnapKV(recent + others, recent, 1)
        self.harness.add(prompt, max_tokens, keep=keep, priority=priority)

    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            if self.harness.core.has_work:
                self.harness.step()

    @precondition(lambda self: self.harness.unfinished)
    @rule(data=st.data(), as_stop=st.booleans())
    def end(self, data, as_stop):
        self.harness.end(data.draw(st.sampled_from(sorted(self.harness.unfinished))), as_stop=as_stop)

    @precondition(lambda self: self.harness.unfinished)
    @rule(data=st.data(), max_tokens=st.integers(1, 10))
    def fork(self, data, max_tokens):
        single = [name for name in sorted(self.harness.unfinished) if self.harness.shadows[name].group is None]
        if single:
            self.harness.fork(data.draw(st.sampled_from(single)), max_tokens)

    @precondition(lambda self: self.harness.unfinished)
    @rule(data=st.data())
    def fail(self, data):
        self.harness.executor.fail_next[data.draw(st.sampled_from(sorted(self.harness.unfinished)))] = "told to fail"

    @rule()
    def reset(self):
        self.harness.core.reset_prefix_cache()
        self.harness.check()

    @rule()
    def drain(self):
        self.harness.executor.fail_next.clear()
        self.harness.drain()

    def teardown(self):
        if hasattr(self, "harness"):
            self.harness.executor.fail_next.clear()
            self.harness.empty()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=300, stateful_step_count=25, deadline=None)


@pytest.mark.large
@pytest.mark.parametrize("seed", range(40))
def test_storms(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        seats = rng.randrange(1, 6)
        harness = Harness(
            block_size=rng.choice([1, 2, 4, 8]),
            num_blocks=rng.randrange(5, 24),
            budget=seats + rng.randrange(20),
            more_alone=rng.choice([0, 30]),
            seats=seats,
            windows=rng.choice(WINDOWS),
            kv_cache=rng.random() < 0.9,
            token_exact=rng.random() < 0.9,
        )
        storm(harness, rng, 60, choosing=all(window is None for window in harness.windows) and seed % 2 == 1)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.large) for seed in range(2, 40))])
def test_branch_storms(seed: int) -> None:
    rng = random.Random(seed)
    num_preemptions = num_storms = 0
    while num_storms < 40 or not num_preemptions:  # a few seeds need more storms to see one preemption
        num_storms += 1
        assert num_storms < 400
        seats = rng.randrange(1, 7)
        harness = Harness(
            block_size=rng.choice([1, 2, 4, 8]),
            num_blocks=rng.randrange(6, 30),
            budget=seats + rng.randrange(20),
            more_alone=rng.choice([0, 30]),
            seats=seats,
            windows=rng.choice(WINDOWS),
            prefix_caching=rng.random() < 0.8,
            kv_cache=rng.random() < 0.9,
            token_exact=rng.random() < 0.9,
            vocab_size=rng.choice([VOCAB_SIZE, 12]),
        )
        branch_storm(harness, rng, 80)
        num_preemptions += harness.num_preempted
