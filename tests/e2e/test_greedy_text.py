"""The same greedy text as transformers, token by token, in f32 on the same dequantised weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

import octavo

NUM_TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "The three primary colours are",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n",
    "In 1969, the first human being",
    "To make bread you need flour,",
    "Q: Why is the sky blue?\nA:",
    "The cache keeps what was computed so that",
    "Translate to French: Good morning, my friend.",
    "import numpy as np\n\n",
    "The most important lesson that I learned is",
    "It was a dark and stormy night;",
    "Roses are red,",
    "A list of fruits: apple, banana,",
    "The opposite of hot is",
    "Photosynthesis is the process by which",
    "été, naïve, 你好:",
)


def test_greedy_text_equals_transformers(smollm2_path: Path, smollm2_reference: PreTrainedModel) -> None:
    """20 prompts x 64 tokens.

    Each of our texts is fed to transformers whole: if at every position its most likely token is the one that we chose,
    its own greedy text is ours, by induction over the positions.
    """
    params = octavo.SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with octavo.LLM(str(smollm2_path), weights_dtype="f32", kv_cache_dtype="f32", kv_cache_memory=2**28) as llm:
        prompts = [llm.model.tokenizer.encode(prompt) for prompt in PROMPTS]
        completions = llm.generate(prompts, params)
    for prompt, completion in zip(prompts, completions, strict=True):
        ours = list(completion.token_ids)
        assert len(ours) == NUM_TOKENS
        with torch.no_grad():
            logits = smollm2_reference(torch.tensor([prompt + ours])).logits[0, len(prompt) - 1 : -1]
        theirs = logits.argmax(-1).tolist()
        first = next((i for i in range(NUM_TOKENS) if theirs[i] != ours[i]), None)
        assert first is None, f"token {first} of {prompt}: {ours[first]} and {theirs[first]}"
        assert np.isfinite(logits.numpy()).all()
