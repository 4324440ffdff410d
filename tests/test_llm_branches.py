"""octavo.LLM with several answers for a prompt, and beam search, on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from octavo import LLM, BeamSearchParams, SamplingParams, branch_seed
from octavo.core.sharing import BranchMemory
from octavo.errors import CapacityError, InvalidRequestError
from tests.models.tiny_models import make_tiny_model

TEXT = "A cache keeps what was computed, so that"
BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4  # tokens, layers, K and V, KV heads, head_dim, f32
ONE = SamplingParams(max_tokens=10, temperature=1.0, seed=9, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama2")


@pytest.fixture
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), kv_cache_memory=64 * BLOCK_BYTES, threads=2) as made:
        yield made
        status = made.model.core.status()
        assert (status.running, status.waiting, status.used_blocks) == (0, 0, 0)


def test_answers_are_those_of_separate_requests(llm: LLM) -> None:
    completion, plain = llm.generate([TEXT, TEXT], [replace(ONE, n=3), ONE])
    assert len(completion.answers) == 3
    assert completion.answers[1:] == completion.alternatives
    assert [answer.branch for answer in completion.answers] == [0, 1, 2]
    separate = llm.generate([TEXT] * 3, [replace(ONE, seed=branch_seed(9, branch)) for branch in range(3)])
    assert [answer.text for answer in completion.answers] == [one.text for one in separate]
    assert (plain.text, plain.alternatives, plain.num_generated_tokens) == (completion.text, (), 10)
    assert completion.num_generated_tokens == 30
    assert completion.sharing is not None
    assert plain.sharing is None


def test_the_best_of_more(llm: LLM) -> None:
    (every,) = llm.generate(TEXT, replace(ONE, n=5, logprobs=0))
    sums = []
    for answer in every.answers:
        assert answer.logprobs is not None
        sums.append(sum(token.logprob or 0.0 for token in answer.logprobs))
    (best,) = llm.generate(TEXT, replace(ONE, n=2, best_of=5))
    order = sorted(range(5), key=lambda branch: -sums[branch])[:2]
    assert [answer.token_ids for answer in best.answers] == [every.answers[branch].token_ids for branch in order]
    assert [answer.score for answer in best.answers] == pytest.approx([sums[branch] for branch in order])
    assert [answer.branch for answer in best.answers] == [0, 1]
    assert best.num_generated_tokens == 50
    assert best.logprobs is None


def test_beam_search(llm: LLM) -> None:
    """The first beam is at least as likely as greedy text; a search of width 1 is greedy text."""
    (greedy,) = llm.generate(TEXT, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0))
    assert greedy.logprobs is not None
    mean = sum(token.logprob or 0.0 for token in greedy.logprobs) / 8
    ((alone,),) = llm.beam_search(TEXT, BeamSearchParams(1, 8, ignore_eos=True))
    assert (alone.token_ids, alone.text, alone.finish_reason) == (greedy.token_ids, greedy.text, "length")
    assert alone.score == pytest.approx(mean, rel=1e-5)
    first, second = llm.beam_search([TEXT, TEXT[:20]], BeamSearchParams(4, 8, ignore_eos=True, num_answers=3))
    assert len(first) == len(second) == 3
    assert [beam.score for beam in first] == sorted([beam.score for beam in first], reverse=True)
    assert first[0].score >= alone.score
    assert len({beam.token_ids for beam in first}) == 3
    assert len(llm.beam_search(TEXT)[0]) == 4, "as many as the width, unless asked otherwise"


def test_each_step_tells_what_branches_hold(llm: LLM) -> None:
    seen: list[tuple[BranchMemory, ...]] = []
    ((*_, beam),) = llm.beam_search(TEXT, BeamSearchParams(4, 8, ignore_eos=True), on_step=seen.append)
    assert len(beam.token_ids) == 8
    assert len(seen) == 8
    assert seen[-1] == ()
    (middle,) = seen[3]
    assert len(middle.tables) == 4
    assert middle.sharing.saved_blocks == sum(len(table.block_ids[0]) for table in middle.tables) - middle.blocks
    assert middle.sharing.saved_blocks >= 3 * min(table.num_shared for table in middle.tables) > 0


def test_prompt_logprobs(llm: LLM) -> None:
    llm.generate(TEXT, ONE)
    (completion,) = llm.generate(TEXT, replace(ONE, prompt_logprobs=1))
    assert completion.prompt_logprobs is not None
    first, *others = completion.prompt_logprobs
    assert first is None
    prompt = llm.model.tokenizer.encode(TEXT)
    assert [one.token_id for one in others if one is not None] == prompt[1:]
    assert completion.num_cached_tokens == 0
    (again,) = llm.generate([[*prompt, 5]], replace(ONE, prompt_logprobs=1))
    assert again.prompt_logprobs is not None
    assert again.prompt_logprobs[: len(prompt)] == completion.prompt_logprobs, "law 1 for scores"


def test_refusals(llm: LLM) -> None:
    with pytest.raises(CapacityError, match="4 branches x max_tokens 400") as caught:
        llm.generate(TEXT, SamplingParams(max_tokens=400, n=4))
    assert caught.value.param == "n"
    with pytest.raises(InvalidRequestError, match="length_penalty"):
        llm.beam_search(TEXT, BeamSearchParams(length_penalty=9.0))
    with pytest.raises(InvalidRequestError, match="best_of is 2"):
        llm.beam_search(TEXT, BeamSearchParams(2, num_answers=3))
