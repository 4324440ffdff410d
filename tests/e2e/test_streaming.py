"""StreamingLLM on a tiny model: each token reads its sinks and its recent tokens and nothing else, and law 1 holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo.core.config import SchedulerConfig
from octavo.core.streaming import StreamingLLM
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32, Ops
from octavo.kernels.reference import ReferenceOps
from octavo.models.loader import load_model, open_model
from tests.e2e import law1_cases as cases
from tests.e2e.law1_engine import GREEDY, Answer, Engine, assert_same, chunked, with_tokens
from tests.models.tiny_models import make_tiny_model

KEEP = StreamingLLM(num_sinks=4, num_recent=20, num_dropped_at_once=16)  # in blocks of 16: 16, 32 and 16 tokens
LONG = replace(with_tokens(GREEDY, 40), ignore_eos=True)
PROMPT = [int(token) for token in np.random.default_rng(3).integers(3, 330, 90)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama3")


def engine_of(path: Path, ops: Ops, **options: object) -> Engine:
    return Engine(load_model(open_model(path), ops, "f32"), ops, "f32", **options)  # type: ignore[arg-type]


def masked_logits(path: Path, token_ids: list[int]) -> F32:
    """transformers in f32, with a mask that says which positions each one reads."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    plan, count = KEEP.plan(16), len(token_ids)
    reads = np.zeros((count, count), bool)
    for position in range(count):
        reads[position, : position + 1] = True
        reads[position, plan.num_sinks : plan.num_sinks + plan.num_dropped(position)] = False
    mask = torch.where(torch.tensor(reads), 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        logits: F32 = model(torch.tensor([token_ids]), attention_mask=mask).logits[0].numpy()
    return logits


@pytest.mark.parametrize("implementation", [NativeOps, ReferenceOps])
def test_logits_are_those_of_a_mask(path: Path, implementation: type[Ops]) -> None:
    answer = engine_of(path, implementation()).ask("a", PROMPT, LONG, keep=KEEP)
    expected = masked_logits(path, [*PROMPT, *answer.token_ids])[len(PROMPT) - 1 : -1]
    assert np.abs(np.stack(answer.logits) - expected).max() < 1e-3
    whole = engine_of(path, implementation()).ask("whole", PROMPT, LONG)
    assert np.abs(whole.logits[0] - answer.logits[0]).max() > 1e-3, "nothing was dropped"


@pytest.fixture(scope="module")
def ops() -> Ops:
    return NativeOps(2)


@pytest.fixture(scope="module")
def cold(path: Path, ops: Ops) -> Answer:
    return engine_of(path, ops).ask("cold", PROMPT, LONG, keep=KEEP)


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 23, 64])
def test_chunks_give_the_same(path: Path, ops: Ops, cold: Answer, num_tokens: int) -> None:
    engine = engine_of(path, ops, config=chunked(num_tokens))
    assert_same(engine.ask("chunked", PROMPT, LONG, keep=KEEP), cold, f"chunks of {num_tokens}")


@pytest.mark.parametrize("num_threads", [1, 4])
def test_threads_give_the_same(path: Path, cold: Answer, num_threads: int) -> None:
    engine = engine_of(path, NativeOps(num_threads))
    assert_same(engine.ask("threads", PROMPT, LONG, keep=KEEP), cold, f"{num_threads} threads")


def test_a_hit_on_the_sinks_gives_the_same(path: Path, ops: Ops, cold: Answer) -> None:
    engine = engine_of(path, ops)
    engine.ask("plain", PROMPT, LONG)
    answer = engine.ask("warm", PROMPT, LONG, keep=KEEP)
    assert answer.final is not None
    assert answer.final.num_cached_tokens == 16
    assert_same(answer, cold, "after one that keeps all")
    plain = engine.ask("again", PROMPT, LONG)
    assert plain.final is not None
    assert plain.final.num_cached_tokens == len(PROMPT) - 1
    assert_same(plain, engine.answers["plain"], "one that keeps all, after one that does not")


def test_among_others_and_after_a_preemption(path: Path, ops: Ops, cold: Answer) -> None:
    """Others that drop at other places, and others that drop nothing, in one batch and in a pool that is too small."""
    others = {"plain": None, "other": StreamingLLM(1, 1, 1)}
    prompt = cases.other_ids(1, 77, 330)
    alone = {name: engine_of(path, ops).ask(name, prompt, LONG, keep=keep) for name, keep in others.items()}
    preemptions = 0
    for num_blocks in (10, 11, 13):
        engine = engine_of(path, ops, num_blocks=num_blocks, config=SchedulerConfig(4, 24))
        engine.add("target", PROMPT, LONG, keep=KEEP)
        for _ in range(5):
            engine.step()
        for name, keep in others.items():
            engine.add(name, prompt, LONG, keep=keep, priority=-1)
        engine.run()
        assert_same(engine.answers["target"], cold, f"pool of {num_blocks} blocks")
        for name, expected in alone.items():
            assert_same(engine.answers[name], expected, name)
        preemptions += engine.preempted("target")
    assert preemptions


def test_memory_is_bounded(path: Path, ops: Ops) -> None:
    engine = engine_of(path, ops, num_blocks=4)
    engine.ask("long", PROMPT, replace(LONG, max_tokens=200), keep=KEEP)
    assert max(len(row.block_tables[0]) for plan in engine.plans for row in plan.rows) == 4
