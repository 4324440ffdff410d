"""A policy that drops tokens, chosen for all requests of a model: what is kept, said, counted and refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, InvalidRequestError, MemoryBudgetError
from tests.models.tiny_families import FAMILIES, make_family
from tests.models.tiny_models import make_tiny_model

GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
PROMPT = [n * 7 % 300 + 3 for n in range(70)]
BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4  # tokens, layers, K and V, KV heads, head_dim, f32
WINDOWLESS = ("gemma2", "gpt_oss")  # whose windows a config can leave out
POLICY = "streaming:4,20,16"  # in blocks: 16, 32 and 16 tokens


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama2")


def test_a_text_beyond_the_pool_is_answered_and_the_loss_is_said(tiny: Path) -> None:
    with pytest.raises(MemoryBudgetError):
        LLM(str(tiny), kv_cache_memory=4 * BLOCK_BYTES, max_model_len=130, threads=1)
    with LLM(str(tiny), kv_cache_memory=4 * BLOCK_BYTES, max_model_len=130, threads=1, kv_policy=POLICY) as llm:
        (told,) = llm.model.degraded
        assert told == (
            f"prefix caching ends after 16 tokens: with kv_policy {POLICY} a text keeps these and its last 32 to 48"
        )
        (first,) = llm.generate(PROMPT, GREEDY)
        (again,) = llm.generate(PROMPT, GREEDY)
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 16)
        assert first.token_ids == again.token_ids
        status = llm.model.core.status()
        assert status.dropped_tokens == 2 * 80, "at 64 tokens and each 16 from there to 128"
        assert status.used_blocks == 0
        with pytest.raises(InvalidRequestError, match="it goes with n 1"):
            llm.generate(PROMPT, SamplingParams(n=2))
    with LLM(str(tiny), kv_cache_memory=64 * BLOCK_BYTES, threads=1) as whole:
        (answer,) = whole.generate(PROMPT, GREEDY)
        assert answer.token_ids != first.token_ids


@pytest.mark.parametrize(
    ("policy", "most_blocks", "words", "num_dropped", "num_found"),
    [
        ("h2o:32,16,16", 3, "nothing comes from the prefix cache", 96, 0),
        ("snapkv:32,8,3", 5, "a text keeps 32 tokens of its prompt in each head", 38, 62),
    ],
)
def test_what_attention_chose_is_kept_and_the_loss_is_said(
    tiny: Path, policy: str, most_blocks: int, words: str, num_dropped: int, num_found: int
) -> None:
    pool = 16 * BLOCK_BYTES
    with LLM(str(tiny), kv_cache_memory=pool, max_model_len=130, threads=1, kv_policy=policy) as llm:
        (told,) = llm.model.degraded
        assert words in told
        assert policy in told
        (first,) = llm.generate(PROMPT, GREEDY)
        whole, again = llm.generate([PROMPT] * 2, [replace(GREEDY, kv_policy="all"), GREEDY])
        assert first.token_ids == again.token_ids != whole.token_ids
        assert again.num_cached_tokens == num_found
        status = llm.model.core.status()
        assert status.dropped_tokens == 2 * num_dropped
        assert status.used_blocks == 0
        with pytest.raises(InvalidRequestError, match="it goes with n 1"):
            llm.generate(PROMPT, SamplingParams(n=2))
    small = most_blocks * BLOCK_BYTES
    with LLM(str(tiny), kv_cache_memory=small, threads=1, kv_policy=policy) as llm:
        assert llm.generate(PROMPT, replace(GREEDY, max_tokens=40))[0].token_ids == first.token_ids[:40]


def test_until_something_is_dropped_answers_are_those_of_the_whole_text(tiny: Path) -> None:
    short = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    answers = []
    for policy in ("all", POLICY):
        with LLM(str(tiny), kv_cache_memory=16 * BLOCK_BYTES, threads=1, kv_policy=policy) as llm:
            (answer,) = llm.generate(PROMPT[:40], short)
            answers.append(answer.token_ids)
    assert answers[0] == answers[1]


def test_a_request_may_say_otherwise(tiny: Path) -> None:
    with LLM(str(tiny), kv_cache_memory=64 * BLOCK_BYTES, threads=1) as llm:
        asked = [replace(GREEDY, kv_policy=policy) for policy in (None, "all", POLICY)]
        plain, whole, bounded = [one.token_ids for one in llm.generate([PROMPT] * 3, asked)]
        assert plain == whole != bounded
        assert llm.model.core.status().dropped_tokens == 80
    with LLM(str(tiny), kv_cache_memory=64 * BLOCK_BYTES, threads=1, kv_policy=POLICY) as llm:
        plain, whole, again = [one.token_ids for one in llm.generate([PROMPT] * 3, asked)]
        assert (plain, again) == (bounded, bounded) != (whole, whole)
    with pytest.raises(InvalidRequestError, match="kv_policy is 'window'"):
        SamplingParams(kv_policy="window")
    with pytest.raises(InvalidRequestError, match="kv_policy is 'snapkv:8,8'; the window of SnapKV is 8; it must be"):
        SamplingParams(kv_policy="snapkv:8,8")


def test_models_that_bound_their_memory_themselves_are_refused(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "mistral_window")
    with pytest.raises(ConfigError, match="has attention windows of its own; take kv_policy all"):
        LLM(str(path), threads=1, kv_policy=POLICY)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_counted_or_choosing_by_it_is_refused(tmp_path: Path, family: str) -> None:
    """Of no family a choice is made by counts that nobody made; without its windows, where it has some."""
    path = make_family(tmp_path / "model", family, **({"sliding_window": None} if family in WINDOWLESS else {}))
    asked = replace(GREEDY, max_tokens=8, kv_policy="snapkv:16,4,3")
    with LLM(str(path), threads=1, kv_cache_memory=4 << 20) as llm:
        why = llm.model.plan.spec.why_not(chooses=True)
        if why is None:
            (answer,) = llm.generate(PROMPT, asked)
            assert len(answer.token_ids) == 8
            assert llm.model.core.status().dropped_tokens == len(PROMPT) - 16
            return
        with pytest.raises(InvalidRequestError, match=why):
            llm.generate(PROMPT, asked)
    with pytest.raises(ConfigError, match=why):
        LLM(str(path), threads=1, kv_cache_memory=4 << 20, kv_policy="snapkv:16,4,3")


def test_a_policy_that_is_none_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="kv_policy is 'window'; it must be all, one of streaming"):
        LLM(str(tiny), threads=1, kv_policy="window")
    with pytest.raises(ConfigError, match="kv_policy is 'h2o:8,9'; the recent tokens of H2O are 9; they must be"):
        LLM(str(tiny), threads=1, kv_policy="h2o:8,9")
