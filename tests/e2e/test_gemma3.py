"""The real Gemma 3 270M: the same greedy text as transformers, token by token, in f32 on the same dequantised weights.

Its window of 512 tokens is passed by one prompt of 4,000 tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import octavo
from tests.e2e.test_greedy_text import PROMPTS

NUM_TOKENS = 32
LONG_TOKENS = 4000
REPOSITORY = Path(__file__).parents[2]


def long_text() -> str:
    """The project's own documents: real text of more than 4,000 tokens."""
    return "\n".join((REPOSITORY / name).read_text() for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "README.md"))


@pytest.mark.large
@pytest.mark.timeout(1500)
def test_greedy_text_equals_transformers(gemma3_path: Path, gemma3_reference: PreTrainedModel) -> None:
    """19 short prompts, and one that passes the window; by induction over the positions, as in test_greedy_text."""
    params = octavo.SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    settings = {"weights_dtype": "f32", "kv_cache_dtype": "f32", "kv_cache_memory": 2**29, "max_model_len": 4096}
    with octavo.LLM(str(gemma3_path), **settings) as llm:
        prompts = [llm.model.tokenizer.encode(prompt) for prompt in PROMPTS[:19]]
        prompts.append(llm.model.tokenizer.encode(long_text())[:LONG_TOKENS])
        assert len(prompts[-1]) == LONG_TOKENS
        completions = llm.generate(prompts, params)
    for prompt, completion in zip(prompts, completions, strict=True):
        ours = list(completion.token_ids)
        assert len(ours) == NUM_TOKENS
        with torch.no_grad():
            found = gemma3_reference(torch.tensor([prompt + ours]), logits_to_keep=NUM_TOKENS + 1)
        theirs = found.logits[0, :-1].argmax(-1).tolist()
        first = next((i for i in range(NUM_TOKENS) if theirs[i] != ours[i]), None)
        assert first is None, f"token {first} of {prompt[:20]}: {ours[first]} and {theirs[first]}"
