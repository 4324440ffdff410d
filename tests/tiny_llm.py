"""What tests of octavo.LLM on a tiny model share."""

from __future__ import annotations

from typing import Any

from octavo import LLM, Completion, SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
TEXTS = ["The quick brown fox", "A cache keeps what was computed, so that", "user system assistant: please tell me"]
BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4  # tokens, layers, K and V, KV heads, head_dim, f32


def one(llm: LLM, prompt: Any, params: SamplingParams | None = GREEDY) -> Completion:
    (completion,) = llm.generate(prompt, params)
    return completion
