"""Candidates of beams, and scores of prompts, from logits that are known."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import PromptScores, SampleSpec
from octavo.executor.sampler import SampleFailure
from octavo.executor.scores import candidates, score_prompt

LOGITS = np.array([0.5, 2.0, -1.0, 2.0, 0.0, -3.0], np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def found(count: int, *, output: tuple[int, ...] = (), banned: tuple[int, ...] = (), **params: object) -> list:
    spec = SampleSpec(SamplingParams(**params), 0, len(output), banned, (), output, num_candidates=count)
    result = candidates(LOGITS, spec)
    assert isinstance(result, tuple), result
    return [(one.token_id, pytest.approx(one.logprob, abs=1e-6)) for one in result]


def test_equals_go_by_id_and_probabilities_are_those_of_all_tokens() -> None:
    logprobs = log_softmax(LOGITS)
    assert found(3) == [(1, logprobs[1]), (3, logprobs[3]), (0, logprobs[0])]
    assert len(found(100)) == 6


def test_bias_penalties_and_bans_change_log_probabilities_as_they_are() -> None:
    """As in transformers: nothing is made to add up to 1 again, and a penalty makes a negative number more so."""
    logprobs = log_softmax(LOGITS)
    assert found(2, banned=(1, 3)) == [(0, logprobs[0]), (4, logprobs[4])]
    assert found(1, logit_bias=((5, 10.0),)) == [(5, logprobs[5] + 10)]
    assert found(6, output=(1,), repetition_penalty=3.0)[0] == (3, logprobs[3])
    assert (1, logprobs[1] * 3) in found(6, output=(1,), repetition_penalty=3.0)
    assert (1, logprobs[1] - 0.5) in found(6, output=(1,), presence_penalty=0.5)


def test_what_fails() -> None:
    spec = SampleSpec(SamplingParams(), 0, 0, tuple(range(6)), num_candidates=2)
    result = candidates(LOGITS, spec)
    assert isinstance(result, SampleFailure)
    assert "every token is banned" in result.reason
    damaged = LOGITS.copy()
    damaged[2] = np.nan
    for failure in (
        candidates(damaged, SampleSpec(SamplingParams(), 0, 0, num_candidates=2)),
        score_prompt(np.stack([LOGITS, damaged]), PromptScores(0, (1, 2), 0)),
    ):
        assert isinstance(failure, SampleFailure)
        assert "1 logits of 6" in failure.reason
    foreign = SampleSpec(SamplingParams(logit_bias=((6, 1.0),)), 0, 0, num_candidates=2)
    assert isinstance(candidates(LOGITS, foreign), SampleFailure)


def test_targets_are_scored_with_what_was_likely_instead() -> None:
    logprobs = log_softmax(LOGITS)
    result = score_prompt(np.stack([LOGITS, LOGITS[::-1]]), PromptScores(0, (5, 0), 2))
    assert isinstance(result, tuple)
    assert [one.token_id for one in result] == [5, 0]
    assert [one.logprob for one in result] == pytest.approx([logprobs[5], logprobs[5]])
    assert [[top.token_id for top in one.top_logprobs] for one in result] == [[1, 3], [2, 4]]
