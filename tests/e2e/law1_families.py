"""The ways to run one request on a model with several KV groups, each of which must give bitwise the same logits.

As `law1_cases`, whose pools are those of one group of layers that keep everything: here windows give blocks up on the
way, so that pools are sought until what a case is about (a preemption, a hit) happens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from octavo.core.config import SchedulerConfig
from tests.e2e import law1_cases as cases
from tests.e2e.law1_engine import GREEDY, Answer, Engine, Ids, assert_same, chunked, with_tokens

MakeEngine = Callable[..., Engine]


def warm_at_offset(make: MakeEngine, prompt: Ids, expected: Answer, num_hit: int) -> None:
    """A stranger shares exactly num_hit tokens, and ends with the block that the last of them is in."""
    engine = make()
    size, vocab_size = engine.spec.block_size, engine.recorder.config.vocab_size
    own = cases.other_ids(num_hit, size - (num_hit + 1) % size, vocab_size)
    stranger = [*prompt[:num_hit], cases.other_than(prompt[num_hit], vocab_size), *own]
    engine.ask("stranger", stranger, with_tokens(GREEDY, 2))
    answer = engine.ask("warm", prompt)
    assert answer.final is not None
    assert answer.final.num_cached_tokens == num_hit
    assert engine.rows_of("warm")[0][1] == num_hit
    assert_same(answer, expected, f"hit of {num_hit} tokens")


def next_turn(make: MakeEngine, prompt: Ids) -> None:
    """The prompt, its answer and more: all full blocks of the first turn are hit, though windows have passed most."""
    engine = make()
    first = engine.ask("first", prompt, with_tokens(GREEDY, 9))
    longer = [*prompt, *first.token_ids, *cases.other_ids(3, 20, engine.recorder.config.vocab_size)]
    answer = engine.ask("second", longer)
    assert answer.final is not None
    size = engine.spec.block_size
    assert answer.final.num_cached_tokens == (len(prompt) + len(first.token_ids) - 1) // size * size
    assert_same(answer, cases.cold(make, longer), "next turn")


def after_preemption(make: MakeEngine, prompt: Ids, num_tokens: int) -> None:
    """The smallest pool in which both can run is too small for both at once."""
    params = replace(with_tokens(GREEDY, num_tokens), ignore_eos=True)
    expected = cases.cold(make, prompt, params)
    spec, config = make().spec, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)
    needed = spec.blocks_for_tokens(len(prompt) + num_tokens, config.max_num_batched_tokens)
    for extra in range(needed):
        engine = make(num_blocks=needed + extra, config=config)
        engine.add("first", cases.other_ids(1, len(prompt), engine.recorder.config.vocab_size), params)
        engine.add("target", prompt, params)
        engine.run()
        assert_same(engine.answers["target"], expected, f"pool of {needed + extra} blocks")
        if engine.preempted("target"):
            return
    raise AssertionError("no pool in which the second request is thrown out")


def fork(make: MakeEngine, prompt: Ids, num_before: int) -> None:
    """A branch goes on from its parent's blocks with another token; both give what each gives cold."""
    params = with_tokens(GREEDY, num_before + 6)
    expected = cases.cold(make, prompt, params)
    engine = make()
    engine.add("parent", prompt, params)
    while len(engine.answers["parent"].token_ids) < num_before:
        engine.step()
    known = [*prompt, *engine.answers["parent"].token_ids]
    avoided = expected.token_ids[num_before]
    branch = replace(params, logit_bias=((avoided, -100.0),))
    engine.scheduler.fork("parent", cases.Request("child", prompt, branch, seed=0))
    engine.run()
    assert_same(engine.answers["parent"], expected, "parent of a fork")
    assert_same(engine.answers["child"], cases.cold(make, known, with_tokens(branch, 6)), "child of a fork")


def in_a_crowd(make: MakeEngine, prompt: Ids, expected: Answer) -> None:
    """Small chunks, strangers, and requests with the same beginning that come while it is computed."""
    engine = make(config=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=19))
    vocab_size = engine.recorder.config.vocab_size
    for index in range(4):
        engine.add(f"s{index}", cases.other_ids(index, 40 + index, vocab_size), with_tokens(GREEDY, 30))
    for index, cut in enumerate((len(prompt), 57, len(prompt), 31)):
        engine.add(f"p{index}", prompt[:cut])
        engine.step()
    engine.run()
    assert_same(engine.answers["p0"], expected, "first of two in a crowd")
    assert_same(engine.answers["p2"], expected, "second of two in a crowd")


def _with_room(make: MakeEngine) -> MakeEngine:
    """A number of blocks is meant for each KV group."""
    count = len(make().spec.groups)
    return lambda *, num_blocks=64, **settings: make(num_blocks=num_blocks * count, **settings)


def gauntlet(make: MakeEngine, prompt: Ids, *, offsets: range) -> None:
    """All of it once; prompt has about 100 tokens, and offsets are hits from nearly nothing to nearly all."""
    expected = cases.cold(make, prompt)
    cases.warm(make, prompt, expected)
    for num_hit in offsets:
        warm_at_offset(make, prompt, expected, num_hit)
    next_turn(make, prompt)
    for num_tokens in (1, 7, 16, 64):
        engine = make(config=chunked(num_tokens))
        assert_same(engine.ask("chunked", prompt), expected, f"chunks of {num_tokens}")
    for num_requests in (3, 16):
        cases.among_strangers(_with_room(make), prompt, expected, num_requests)
    # shorter than a window: what a request holds grows while it decodes, by more than what admission leaves free
    size = make().spec.block_size
    after_preemption(make, prompt[:10], 40 if size <= 16 else 3 * size)
    fork(make, prompt, 2)
    fork(make, prompt, 13)
    cases.without_kv_cache(make, prompt, expected)
    in_a_crowd(make, prompt, expected)
