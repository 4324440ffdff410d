"""Random life for a harness: storms of requests, and pools that are too small for what comes."""

from __future__ import annotations

import random

from octavo.core.heavy_hitters import HeavyHitters
from octavo.core.keep_policy import KeepPolicy
from octavo.core.snap_kv import SnapKV
from octavo.core.streaming import StreamingLLM
from tests.core.core_harness import Harness
from tests.core.group_windows import Windows
from tests.core.shadow import VOCAB_SIZE

STORM_WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None, 5), (None,), (None, None))


def any_choice(rng: random.Random) -> KeepPolicy:
    """A small policy that chooses by attention."""
    recent = rng.randrange(1, 5)
    if rng.random() < 0.5:
        return SnapKV(recent + rng.randrange(1, 8), recent, 1)
    return HeavyHitters(recent + rng.randrange(1, 8), recent, rng.randrange(1, 6))


def storm(
    harness: Harness, rng: random.Random, num_actions: int, *, streaming: bool = False, choosing: bool = False
) -> None:
    """Random life: prompts that share prefixes, branches, ends in any state, then everything drains.

    With `streaming`, half of the requests keep their first and their recent tokens only; with `choosing`, what
    attention chose.
    """
    shared = [[rng.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(2)]
    for _ in range(num_actions):
        action = rng.random()
        if action < 0.4:
            tail = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 6))]
            prompt = rng.choice(shared)[: rng.randrange(25)] + tail
            namespace, priority = rng.choice(["", "", "", "other"]), rng.choice([0, 0, 0, -1, 1])
            harness.add(prompt, rng.randrange(1, 12), namespace=namespace, priority=priority)
            if streaming:
                keep: KeepPolicy = StreamingLLM(rng.randrange(1, 4), rng.randrange(1, 9), rng.randrange(1, 5))
                harness.add(prompt, rng.randrange(1, 30), namespace=namespace, priority=priority, keep=keep)
            if choosing:
                keep = any_choice(rng)
                harness.add(prompt, rng.randrange(1, 30), namespace=namespace, priority=priority, keep=keep)
        elif action < 0.45 and harness.unfinished:
            harness.end(rng.choice(list(harness.unfinished)), as_stop=rng.random() < 0.3)
        elif action < 0.55 and harness.scheduler.running:
            harness.fork(rng.choice(harness.scheduler.running).request_id, rng.randrange(1, 12))
        elif action < 0.57 and harness.scheduler.running:
            harness.executor.fail_next[rng.choice(harness.scheduler.running).request_id] = "told to fail"
        elif harness.core.has_work:
            harness.step()
    harness.executor.fail_next.clear()
    harness.empty()


def branch_storm(harness: Harness, rng: random.Random, num_actions: int) -> None:
    """As `storm`, most requests having several branches."""
    shared = [[rng.randrange(3) for _ in range(24)] for _ in range(2)]
    for _ in range(num_actions):
        action = rng.random()
        prompt = rng.choice(shared)[: rng.randrange(25)] + [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        eos, max_tokens, priority = rng.choice([(), (0,)]), rng.randrange(1, 12), rng.choice([0, 0, 0, -1])
        if action < 0.15:
            harness.add_branches(prompt, max_tokens, width=rng.randrange(2, 5), eos=eos, priority=priority)
        elif action < 0.3:
            width = rng.randrange(1, 5)
            early, penalty = rng.choice([True, False, "never"]), rng.choice([0.0, 1.0, 2.0, -1.0])
            about = {"n": rng.randrange(1, width + 1), "early_stopping": early, "length_penalty": penalty}
            about["min_tokens"] = rng.choice([0, 0, 2 if max_tokens > 2 else 0])
            harness.add_branches(
                prompt, max_tokens, width=width, use_beam_search=True, eos=eos, priority=priority, **about
            )
        elif action < 0.35:
            harness.add(prompt, max_tokens, eos=eos, priority=priority)
        elif action < 0.42 and harness.unfinished:
            harness.end(rng.choice(list(harness.unfinished)), as_stop=rng.random() < 0.6)
        elif action < 0.46 and harness.scheduler.running:
            last = harness.scheduler.running[-1].request_id  # often one that others wait to join
            if last in harness.unfinished:
                harness.end(last, as_stop=True)
        elif action < 0.48 and harness.unfinished:
            harness.executor.fail_next[rng.choice(list(harness.unfinished))] = "told to fail"
        elif harness.core.has_work:
            harness.step()
    harness.executor.fail_next.clear()
    harness.empty()


def squeeze(rng: random.Random, windows: Windows = (None,)) -> Harness:
    """Branches and long answers fill a tight pool, then an urgent long prompt comes in small chunks: preemption."""
    num_blocks = 15 if any(windows) else 24  # of each group; behind a window less is needed
    harness = Harness(block_size=2, num_blocks=num_blocks, budget=5, seats=4, windows=windows)
    for _ in range(3):
        harness.add([rng.randrange(VOCAB_SIZE) for _ in range(3)], 18, priority=rng.choice([0, 1]))
    for _ in range(rng.randrange(4, 10)):
        harness.step()
    harness.add([rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(12, 20))], 8, priority=-1)
    for _ in range(2):
        harness.add([rng.randrange(VOCAB_SIZE) for _ in range(8)], 8)
    harness.empty()
    return harness
