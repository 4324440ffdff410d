"""Logits -> how likely tokens are: the candidates of a beam, and the tokens of a prompt. Row by row, as the sampler.

It does not know what a beam is, nor which candidates are taken.
"""

from __future__ import annotations

import numpy as np

from octavo.core.step import PromptScores, SampledToken, SampleSpec, TokenLogprob
from octavo.executor.sampler import SampleFailure, change_logits, fault_of, most_likely, token_of
from octavo.kernels.ops import F32


def candidates(row: F32, spec: SampleSpec) -> tuple[TokenLogprob, ...] | SampleFailure:
    """The `spec.num_candidates` most likely tokens after a row of logits [vocab_size]; fewer if there are no more.

    Bias, penalties and bans change the log-probabilities, which are not made to add up to 1 again: as in transformers.
    """
    failure = fault_of(row, spec)
    if failure is not None:
        return failure
    shifted = row - row.max()
    log_probs = shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))  # [vocab_size], float32
    changed = change_logits(log_probs, spec)
    ids = most_likely(changed, min(spec.num_candidates, len(changed)))
    found = tuple(TokenLogprob(int(i), float(changed[i])) for i in ids if np.isfinite(changed[i]))
    return found if found else SampleFailure("no token may follow: every token is banned, or bias leaves none")


def score_prompt(logits: F32, scores: PromptScores) -> tuple[SampledToken, ...] | SampleFailure:
    """How likely each target is after its row of logits [len(targets), vocab_size]."""
    found = []
    for row, token_id in zip(logits, scores.targets, strict=True):
        failure = fault_of(row)
        if failure is not None:
            return failure
        found.append(token_of(row, token_id, scores.num_top))
    return tuple(found)
