"""The `usage` of an answer: tokens of the prompts, each counted once, and of everything that was drawn for them.

It does not know where the answer goes.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.outputs import GenerationDelta


def usage_of(choices: Sequence[GenerationDelta], num_answers: int) -> dict[str, object]:
    """choices: the last delta of each, the `num_answers` choices of a prompt side by side.

    `prompt_tokens` includes the cached ones; `completion_tokens` those of branches that became no answer. `octavo` is
    there only where requests had several branches.
    """
    requests = [choices[start : start + num_answers] for start in range(0, len(choices), num_answers)]
    prompt = sum(request[0].num_prompt_tokens for request in requests)
    output = sum(max(choice.num_generated_tokens for choice in request) for request in requests)
    usage: dict[str, object] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(choices, num_answers)},
    }
    shared = [choice.sharing for choice in choices if choice.sharing is not None]
    if shared:
        usage["octavo"] = {
            "branch_peak_saved_blocks": sum(sharing.peak_saved_blocks for sharing in shared),
            "branch_peak_blocks": sum(sharing.peak_blocks for sharing in shared),
        }
    return usage


def cached_tokens(choices: Sequence[GenerationDelta], num_answers: int) -> int:
    return sum(choice.num_cached_tokens for choice in choices[::num_answers])
