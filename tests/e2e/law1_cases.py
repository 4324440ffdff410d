"""The ways in which one request can be run, each of which must give bitwise the same logits (law 1).

Every case first makes sure that what it is about (hit, copy, chunk, batch, preemption, fork) really happened.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from octavo.core.config import SchedulerConfig
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from tests.e2e.law1_engine import GREEDY, Answer, Engine, Ids, assert_same, chunked, with_tokens

MakeEngine = Callable[..., Engine]


def other_ids(seed: int, count: int, vocab_size: int) -> list[int]:
    """Tokens of a stranger."""
    rng = random.Random(seed)
    return [rng.randrange(3, vocab_size) for _ in range(count)]


def other_than(token_id: int, vocab_size: int) -> int:
    return (token_id + 1) % vocab_size


def cold(make: MakeEngine, prompt: Ids, params: SamplingParams = GREEDY, *, seed: int = 0) -> Answer:
    engine = make()
    answer = engine.ask("cold", prompt, params, seed=seed)
    assert answer.final is not None
    assert answer.final.num_cached_tokens == 0
    assert len(answer.logits) == len(answer.token_ids)
    return answer


def warm(make: MakeEngine, prompt: Ids, expected: Answer) -> None:
    """The same prompt again: all its full blocks are hit."""
    engine = make()
    first = engine.ask("first", prompt)
    again = engine.ask("again", prompt)
    assert again.final is not None
    size = engine.spec.block_size
    assert again.final.num_cached_tokens >= (len(prompt) - 1) // size * size > 0
    assert_same(first, expected, "first")
    assert_same(again, expected, "warm")


def warm_at_offset(make: MakeEngine, prompt: Ids, expected: Answer, num_hit: int) -> None:
    """A stranger's prompt shares exactly num_hit tokens, which may end inside a block: that part is copied."""
    engine = make()
    size, vocab_size = engine.spec.block_size, engine.recorder.config.vocab_size
    stranger = [*prompt[:num_hit], other_than(prompt[num_hit], vocab_size), *other_ids(num_hit, 2 * size, vocab_size)]
    engine.ask("stranger", stranger)
    copies = engine.num_copies
    answer = engine.ask("warm", prompt)
    assert answer.final is not None
    assert answer.final.num_cached_tokens == num_hit
    assert engine.num_copies - copies == (1 if num_hit % size else 0)
    assert engine.rows_of("warm")[0][1] == num_hit
    assert_same(answer, expected, f"hit of {num_hit} tokens")


def in_chunks(make: MakeEngine, prompt: Ids, expected: Answer, num_tokens: int) -> None:
    engine = make(config=chunked(num_tokens))
    answer = engine.ask("chunked", prompt)
    prefill = [count for _, start, count in engine.rows_of("chunked") if start < len(prompt)]
    assert max(prefill) == min(num_tokens, len(prompt))
    assert len(prefill) == -(-len(prompt) // num_tokens)
    assert_same(answer, expected, f"chunks of {num_tokens}")


def among_strangers(make: MakeEngine, prompt: Ids, expected: Answer, num_requests: int) -> None:
    """The request decodes in batches with others, of other lengths, that came before and after it."""
    engine = make(num_blocks=32 * 10)
    vocab_size = engine.recorder.config.vocab_size
    for index in range(num_requests - 1):
        if index == num_requests // 2:
            engine.add("target", prompt)
        engine.add(f"s{index}", other_ids(index, 5 + 13 * index % 90, vocab_size), with_tokens(GREEDY, 12 + index % 5))
    if num_requests <= 2:
        engine.add("target", prompt)
    engine.run()
    steps = [engine.plans[index] for index, _, _ in engine.rows_of("target")]
    assert max(len(plan.rows) for plan in steps) == num_requests
    assert_same(engine.answers["target"], expected, f"batch of {num_requests}")


def after_preemption(make: MakeEngine, prompt: Ids, params: SamplingParams, expected: Answer) -> None:
    """The pool is too small for two: the later request is thrown out in the middle and computed again."""
    size = make().spec.block_size
    needed = -(-(len(prompt) + params.max_tokens) // size)
    engine = make(num_blocks=needed + 1 + len(prompt) // size)
    vocab_size = engine.recorder.config.vocab_size
    engine.add("first", other_ids(1, len(prompt), vocab_size), replace(params, ignore_eos=True))
    engine.add("target", prompt, params)
    engine.run()
    assert engine.preempted("target")
    starts = [start for _, start, _ in engine.rows_of("target")]
    assert starts != sorted(starts), "computed again from an earlier position"
    assert_same(engine.answers["target"], expected, "after preemption")


def after_a_fork(make: MakeEngine, prompt: Ids, num_before: int) -> None:
    """A branch shares the parent's blocks, full and unfilled, and takes another token at once; both go on."""
    engine = make()
    size = engine.spec.block_size
    params = with_tokens(GREEDY, num_before + 6)
    engine.add("parent", prompt, params)
    while len(engine.answers["parent"].token_ids) < num_before:
        engine.step()
    known = [*prompt, *engine.answers["parent"].token_ids]
    expected_parent = cold(make, prompt, params)
    avoided = expected_parent.token_ids[num_before]
    branch = replace(params, logit_bias=((avoided, -100.0),))
    copies = engine.num_copies
    engine.scheduler.fork("parent", Request("child", prompt, branch, seed=0))
    (parent, child) = engine.scheduler.running
    shared = [a for a, b in zip(parent.block_tables[0], child.block_tables[0], strict=True) if a == b]
    assert len(shared) == -(-(len(known) - 1) // size)
    engine.run()
    unfilled = (len(known) - 1) % size != 0
    assert engine.num_copies - copies == unfilled
    expected_child = cold(make, known, with_tokens(branch, 6))
    assert expected_child.token_ids[0] != avoided
    assert_same(engine.answers["parent"], expected_parent, "parent of a fork")
    assert_same(engine.answers["child"], expected_child, "child of a fork")


def without_kv_cache(make: MakeEngine, prompt: Ids, expected: Answer) -> None:
    """Everything is computed again for every token."""
    engine = make(config=SchedulerConfig(enable_kv_cache=False))
    answer = engine.ask("uncached", prompt)
    rows = engine.rows_of("uncached")
    assert [(start, count) for _, start, count in rows] == [(0, len(prompt) + i) for i in range(GREEDY.max_tokens)]
    assert_same(answer, expected, "no KV cache")


def all_at_once(make: MakeEngine, prompt: Ids, expected: Answer) -> None:
    """A small pool, small chunks, strangers, and requests with the same beginning that come while it is computed."""
    engine = make(num_blocks=22, config=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=19))
    vocab_size = engine.recorder.config.vocab_size
    for index in range(4):
        engine.add(f"s{index}", other_ids(index, 40 + index, vocab_size), with_tokens(GREEDY, 70))
    for index, cut in enumerate((len(prompt), 57, len(prompt), 31)):
        engine.add(f"p{index}", prompt[:cut])
        engine.step()
    engine.run()
    assert engine.answers["p2"].final is not None
    assert engine.answers["p2"].final.num_cached_tokens > 0
    assert engine.core.status().preemptions > 0
    assert_same(engine.answers["p0"], expected, "first of two in a crowd")
    assert_same(engine.answers["p2"], expected, "second of two in a crowd")


def gauntlet(make: MakeEngine, prompt: Ids) -> None:
    """All of the above once; prompt has about 100 tokens."""
    expected = cold(make, prompt)
    size = make().spec.block_size
    warm(make, prompt, expected)
    for num_hit in (2 * size, 2 * size + 1, 2 * size + 9, 3 * size - 1):
        warm_at_offset(make, prompt, expected, num_hit)
    for num_tokens in (1, 7, 16, 64, 512):
        in_chunks(make, prompt, expected, num_tokens)
    for num_requests in (1, 3, 32):
        among_strangers(make, prompt, expected, num_requests)
    longer, start = with_tokens(GREEDY, 40 * size // 16), prompt[: 60 * size // 16]
    after_preemption(make, start, longer, cold(make, start, longer))
    after_a_fork(make, prompt, 2)
    without_kv_cache(make, prompt, expected)
