"""Log-probabilities of the prompt's own tokens, on SmolLM2: what a forward pass of transformers gives in f32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from octavo import LLM, SamplingParams
from tests.e2e.test_law1 import TEXT

NUM_TOP = 3


@pytest.mark.parametrize("num_answers", [1, 3])
def test_they_equal_transformers(smollm2_path: Path, smollm2_reference: PreTrainedModel, num_answers: int) -> None:
    """In chunks, and though the prompt is in the cache: what is scored is computed."""
    options = {"kv_cache_memory": 2**27, "max_num_seqs": 4, "max_num_batched_tokens": 17}
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=NUM_TOP, n=num_answers)
    with LLM(str(smollm2_path), weights_dtype="f32", kv_cache_dtype="f32", **options) as llm:
        prompt = llm.model.tokenizer.encode(TEXT)[:90]
        llm.generate(prompt, SamplingParams(max_tokens=1))
        (found,) = llm.generate(prompt, params)
        assert (found.num_prompt_tokens, found.num_cached_tokens) == (90, 0)
        (again,) = llm.generate(prompt, SamplingParams(max_tokens=1))
        assert again.num_cached_tokens == 80, "the next one hits its full blocks as ever"
    with torch.no_grad():
        expected = smollm2_reference(torch.tensor([prompt])).logits[0].log_softmax(-1).numpy()
    assert found.prompt_logprobs is not None
    assert found.prompt_logprobs[0] is None
    assert len(found.prompt_logprobs) == 90
    for position, scored in enumerate(found.prompt_logprobs[1:], 1):
        assert scored is not None
        row = expected[position - 1]
        assert scored.token_id == prompt[position]
        assert scored.logprob == pytest.approx(row[prompt[position]], abs=1e-3)
        assert [one.token_id for one in scored.top_logprobs] == np.argsort(-row, kind="stable")[:NUM_TOP].tolist()
        assert [one.logprob for one in scored.top_logprobs] == pytest.approx(np.sort(row)[::-1][:NUM_TOP], abs=1e-3)
    assert len(found.answers) == num_answers
    assert len({answer.token_ids for answer in found.answers}) == 1, "greedy"
