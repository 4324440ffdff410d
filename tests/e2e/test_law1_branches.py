"""Law 1 for branches, on the default serving path: native kernels, SmolLM2, bf16 weights and bf16 KV.

Sample i of a request is bitwise what a separate request with seed `branch_seed(seed, i)` gets, logits and tokens, and a
beam search finds the same texts with the same scores: alone, in batches, in chunks, after preemption, on a warm cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.core.seeds import branch_seed
from tests.e2e.law1_cases import cold, other_ids, other_than
from tests.e2e.law1_engine import GREEDY, Answer, Engine, Ids, assert_same, chunked, with_tokens
from tests.e2e.test_law1 import TEXT, loader, prompt  # noqa: F401

SEED = 11
WIDTH = 4
ONE = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.97, frequency_penalty=0.2, ignore_eos=True)
SAMPLES = replace(ONE, n=WIDTH)
BEAMS = SamplingParams(max_tokens=24, n=WIDTH, best_of=WIDTH, use_beam_search=True, temperature=0.0)
VOCAB_SIZE = 49152
Make = Callable[..., Engine]
Check = Callable[[Engine], None]


@pytest.fixture(scope="module")
def make(smollm2_path: Path) -> Make:
    return loader(smollm2_path)


@pytest.fixture(scope="module")
def separate(make: Make, prompt: Ids) -> list[Answer]:  # noqa: F811
    answers = [cold(make, prompt[:60], ONE, seed=branch_seed(SEED, index)) for index in range(WIDTH)]
    assert len({tuple(answer.token_ids) for answer in answers}) == WIDTH, "the samples differ"
    return answers


@pytest.fixture(scope="module")
def beams(make: Make, prompt: Ids) -> list[tuple[list[int], float | None]]:  # noqa: F811
    engine = make()
    engine.add("target", prompt[:60], BEAMS)
    engine.run()
    return beams_of(engine)


def names(count: int = WIDTH) -> list[str]:
    return [f"target#{index}" if index else "target" for index in range(count)]


def beams_of(engine: Engine) -> list[tuple[list[int], float | None]]:
    finals = [engine.answers[name].final for name in names()]
    assert all(final is not None and final.finish_reason in ("stop", "length") for final in finals)
    return [(list(final.token_ids), final.score) for final in finals if final is not None]


def check(engine: Engine, params: SamplingParams, separate: list[Answer], beams: object) -> None:
    if params.use_beam_search:
        assert beams_of(engine) == beams
        return
    for index, name in enumerate(names()):
        assert_same(engine.answers[name], separate[index], f"sample {index}")
        final = engine.answers[name].final
        assert final is not None
        assert final.sharing is None or final.sharing.peak_saved_blocks >= 3 * (60 // 16)


BOTH = pytest.mark.parametrize("params", [SAMPLES, BEAMS], ids=["samples", "beams"])


@BOTH
def test_alone(make: Make, prompt: Ids, params: SamplingParams, separate: list[Answer], beams: object) -> None:  # noqa: F811
    """The prompt is computed once."""
    engine = make()
    engine.add("target", prompt[:60], params, seed=SEED)
    engine.run()
    check(engine, params, separate, beams)
    assert sum(len(row.token_ids) for plan in engine.plans for row in plan.rows if row.start < 60) == 60


@BOTH
@pytest.mark.parametrize("num_tokens", [5, 16])
def test_chunks(
    make: Make,
    prompt: Ids,  # noqa: F811
    params: SamplingParams,
    num_tokens: int,
    separate: list[Answer],
    beams: object,
) -> None:
    engine = make(config=chunked(num_tokens, max_num_seqs=WIDTH))
    engine.add("target", prompt[:60], params, seed=SEED)
    engine.run()
    check(engine, params, separate, beams)


@BOTH
def test_among_strangers(
    make: Make,
    prompt: Ids,  # noqa: F811
    params: SamplingParams,
    separate: list[Answer],
    beams: object,
) -> None:
    engine = make(num_blocks=128)
    for index in range(6):
        if index == 3:
            engine.add("target", prompt[:60], params, seed=SEED)
        engine.add(f"s{index}", other_ids(index, 5 + 13 * index, VOCAB_SIZE), with_tokens(GREEDY, 12 + index))
    engine.run()
    assert max(len(plan.rows) for plan in engine.plans) == 6 + WIDTH
    check(engine, params, separate, beams)


@BOTH
def test_after_preemption(
    make: Make,
    prompt: Ids,  # noqa: F811
    params: SamplingParams,
    separate: list[Answer],
    beams: object,
) -> None:
    """The whole request is thrown out, and what its branches share is computed again once."""
    engine = make(num_blocks=16)
    engine.add("first", other_ids(1, 100, VOCAB_SIZE), replace(GREEDY, max_tokens=100, ignore_eos=True))
    for _ in range(12):
        engine.step()
    engine.add("target", prompt[:60], params, seed=SEED)
    engine.run()
    assert engine.preempted("target")
    check(engine, params, separate, beams)


@BOTH
@pytest.mark.parametrize("num_hit", [48, 55, 59])
def test_on_a_warm_cache(
    make: Make,
    prompt: Ids,  # noqa: F811
    params: SamplingParams,
    num_hit: int,
    separate: list[Answer],
    beams: object,
) -> None:
    engine = make()
    stranger = [*prompt[:num_hit], other_than(prompt[num_hit], VOCAB_SIZE), *other_ids(num_hit, 32, VOCAB_SIZE)]
    engine.ask("stranger", stranger)
    engine.add("target", prompt[:60], params, seed=SEED)
    engine.run()
    final = engine.answers["target"].final
    assert final is not None
    assert final.num_cached_tokens == num_hit
    check(engine, params, separate, beams)


@BOTH
def test_without_kv_cache(
    make: Make,
    prompt: Ids,  # noqa: F811
    params: SamplingParams,
    separate: list[Answer],
    beams: object,
) -> None:
    engine = make(config=replace(chunked(512, max_num_seqs=WIDTH), enable_kv_cache=False))
    short = replace(params, max_tokens=3)
    engine.add("target", prompt[:60], short, seed=SEED)
    engine.run()
    if params is SAMPLES:
        for index, name in enumerate(names()):
            assert engine.answers[name].token_ids == separate[index].token_ids[:3]
    else:
        expected = make()
        expected.add("target", prompt[:60], short)
        expected.run()
        assert beams_of(engine) == beams_of(expected)
