"""Memory for large steps is there before the first of them, and nothing else is different."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.executor.memory import resident_bytes
from tests.models.tiny_models import make_tiny_model

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, ignore_eos=True)
PROMPT = [7, 8, 9] * 40


@pytest.mark.parametrize("family", ["llama2", "qwen3"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_answers_are_the_same_and_the_cache_keeps_what_it_has(family: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, family)
    with LLM(str(tmp_path), kv_cache_memory=1 << 20, kv_cache_dtype=kv_cache_dtype, threads=1) as llm:
        (cold,) = llm.generate([PROMPT], PARAMS)
        assert llm.model.idle_work is not None
        while llm.model.idle_work():
            pass
        (warm,) = llm.generate([PROMPT], PARAMS)
    assert warm.num_cached_tokens > 0
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)


def test_a_long_prompt_finds_its_memory(smollm2_path: Path) -> None:
    with LLM(str(smollm2_path), kv_cache_memory=64 << 20, threads=2) as llm:
        assert llm.model.idle_work is not None
        before = resident_bytes()
        while llm.model.idle_work():
            pass
        ready = resident_bytes()
        llm.generate([list(range(3, 2003))], SamplingParams(max_tokens=1))
        assert ready - before > 10 << 20
        assert resident_bytes() - ready < 8 << 20
