"""Beam search on SmolLM2: the same texts and scores as transformers in f32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from octavo import LLM, BeamSearchParams
from tests.e2e.test_greedy_text import PROMPTS

MAX_TOKENS = 16
TOLERANCE = 5e-4  # of a sum of up to 16 log-probabilities in f32
SETTINGS = [
    (width, penalty, early) for width in (2, 4, 8) for penalty in (-0.5, 1.0, 2.0) for early in (False, True, "never")
]
DEFAULT = (4, 1.0, False)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_path), weights_dtype="f32", kv_cache_dtype="f32", kv_cache_memory=2**29) as made:
        yield made


Found = list[tuple[list[int], float]]


@pytest.fixture(scope="module")
def theirs(smollm2_reference: PreTrainedModel) -> Callable[..., Found]:
    def search(prompt: list[int], width: int, penalty: float, early: bool | str) -> Found:
        with torch.no_grad():
            given: Any = smollm2_reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                length_penalty=penalty,
                early_stopping=early,
                eos_token_id=2,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        texts = []
        for row, score in zip(given.sequences.tolist(), given.sequences_scores.tolist(), strict=True):
            new = row[len(prompt) :]
            texts.append((new[: new.index(2) + 1] if 2 in new else new, score))
        return texts

    return search


# transformers' own search is the slow part, and several times slower yet on a machine with busy neighbours
LARGE = [pytest.mark.large, pytest.mark.timeout(1500)]
USUAL = [pytest.mark.timeout(1500)]


@pytest.mark.parametrize(
    "setting",
    [pytest.param(one, marks=USUAL if one == DEFAULT else LARGE) for one in SETTINGS],
    ids=lambda one: f"width {one[0]}, length_penalty {one[1]}, early_stopping {one[2]}",
)
def test_texts_and_scores_equal_transformers(llm: LLM, theirs: Callable[..., Found], setting: Any) -> None:
    width, penalty, early = setting
    params = BeamSearchParams(width, MAX_TOKENS, penalty, early)
    prompts = [llm.model.tokenizer.encode(prompt) for prompt in PROMPTS]
    for prompt, found in zip(prompts, llm.beam_search(prompts, params), strict=True):
        expected = theirs(prompt, width, penalty, early)
        assert [list(beam.token_ids) for beam in found] == [text for text, _ in expected]
        for beam, (_, score) in zip(found, expected, strict=True):
            assert beam.score == pytest.approx(score, abs=TOLERANCE / len(beam.token_ids) ** penalty)
        for beam in found:
            assert beam.finish_reason == ("stop" if beam.token_ids[-1] == 2 else "length")
    assert llm.model.core.status().used_blocks == 0
