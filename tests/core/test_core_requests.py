"""A request by itself, and the config: what is refused, and what the sampler is told."""

from __future__ import annotations

import pytest

from octavo.core.config import SchedulerConfig
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.errors import ConfigError, InvalidRequestError


def request_of(params: SamplingParams, eos: tuple[int, ...] = (9,)) -> Request:
    return Request("r", [1, 2, 3], params, seed=5, eos_token_ids=eos)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "0 tokens"),
        ([-1], "0 to 4294967295"),
        ([2**32], "0 to 4294967295"),
        ([1.5], "no token id"),
        (["a"], "no token id"),
    ],
)
def test_prompts_that_are_none(prompt: list, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        Request("r", prompt, SamplingParams(), seed=0)
    assert caught.value.param == "prompt"


def test_stop_tokens_are_banned_until_min_tokens_are_there() -> None:
    request = request_of(SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(7,)))
    for position in range(2):
        spec = request.sample_spec()
        assert (spec.position, spec.seed, spec.banned_token_ids) == (position, 5, (7, 9))
        assert request.take_token(7, 100) is None, "an executor that does not obey ends nothing"
    assert request.sample_spec().banned_token_ids == ()
    assert request.take_token(7, 100) == "stop"
    assert request.stop_reason == 7
    assert request.output_token_ids == (7, 7, 7)


def test_ignore_eos_leaves_stop_tokens() -> None:
    request = request_of(SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(7,)))
    assert request.take_token(9, 100) is None
    assert request.take_token(7, 100) == "stop"


def test_limits_end_as_length_and_a_stop_token_goes_before() -> None:
    assert request_of(SamplingParams(max_tokens=1)).take_token(1, 100) == "length"
    assert request_of(SamplingParams(max_tokens=1)).take_token(9, 100) == "stop"
    request = request_of(SamplingParams(max_tokens=50))
    assert [request.take_token(1, 5), request.take_token(1, 5)] == [None, "length"]


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_alone_need_the_text(name: str) -> None:
    plain = request_of(SamplingParams(max_tokens=9))
    plain.take_token(4, 100)
    assert (plain.sample_spec().prompt_token_ids, plain.sample_spec().output_token_ids) == ((), ())
    penalised = request_of(SamplingParams(max_tokens=9, **{name: 1.5}))
    penalised.take_token(4, 100)
    spec = penalised.sample_spec()
    assert (list(spec.prompt_token_ids), list(spec.output_token_ids)) == ([1, 2, 3], [4])
    penalised.token_ids.append(5)
    assert list(spec.output_token_ids) == [4]  # a snapshot


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, r"7; it must be at least max_num_seqs \(8\)"),
        ({"max_num_batched_tokens": 99, "max_num_prefill_tokens": 98}, r"98; it must be at least .* \(99\)"),
        ({"max_model_len": 1}, "max_model_len is 1"),
    ],
)
def test_limits_that_contradict_are_refused(limits: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**limits)
