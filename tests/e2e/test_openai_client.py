"""The official openai client against SmolLM2 on the native kernels, over a real socket."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.core.seeds import branch_seed
from tests.e2e.background_server import MODEL, BackgroundServer, kv_status

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]


@pytest.fixture(scope="module")
def address(smollm2_path: Path) -> Iterator[str]:
    server = BackgroundServer(smollm2_path)
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0, timeout=120) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat_whole_and_streamed_are_the_same(client: openai.OpenAI) -> None:
    common: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**common)
    text = whole.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    assert whole.usage is not None
    streamed, usage, reasons = "", None, []
    for chunk in client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            streamed += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
        usage = chunk.usage or usage
    assert streamed == text
    assert reasons == [whole.choices[0].finish_reason]
    assert usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1  # all but the token to run again


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    prompts = ["One, two, three,", "Monday, Tuesday, Wednesday,", "The sky is"]
    together = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=8)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    for prompt, choice in zip(prompts, together.choices, strict=True):
        alone = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8, echo=True)
        assert alone.choices[0].text == prompt + choice.text
    assert " four" in together.choices[0].text
    assert "Thursday" in together.choices[1].text
    streamed = ["", "", ""]
    for chunk in client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=8, stream=True):
        for part in chunk.choices:
            streamed[part.index] += part.text
    assert streamed == [choice.text for choice in together.choices]


def test_seeds_repeat(client: openai.OpenAI) -> None:
    texts = [
        client.completions.create(model=MODEL, prompt="Once upon a time", seed=seed, temperature=1, max_tokens=16)
        .choices[0]
        .text
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_logprobs_of_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert answer.usage is not None
    assert len(content) == answer.usage.completion_tokens - 1  # the end token is no part of the answer
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0  # greedy draws the most likely
        assert entry.token == entry.top_logprobs[0].token
        assert bytes(entry.bytes or []).decode() == entry.token
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content


def test_logprobs_of_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="One, two,", temperature=0, max_tokens=6, logprobs=2)
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert scores.text_offset is not None
    assert scores.top_logprobs is not None
    text = answer.choices[0].text
    assert "".join(scores.tokens) == text
    for offset, token, top in zip(scores.text_offset, scores.tokens, scores.top_logprobs, strict=True):
        assert text[offset:].startswith(token)
        assert token in top


def test_stop(client: openai.OpenAI) -> None:
    common: dict[str, Any] = {"model": MODEL, "prompt": "One, two, three,", "temperature": 0, "max_tokens": 40}
    free = client.completions.create(**common).choices[0].text
    stopped = client.completions.create(**common, stop=["six", "nothing"]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == free[: free.index("six")]
    streamed = client.completions.create(**common, stop=" six", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == free[: free.index(" six")]


def test_extras_of_open_engines(client: openai.OpenAI) -> None:
    extra = {
        "top_k": 1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "min_tokens": 4,
        "cache_salt": "s",
    }
    answer = client.completions.create(model=MODEL, prompt="The", max_tokens=4, extra_body=extra)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_n_whole_and_streamed_in_a_chat(client: openai.OpenAI) -> None:
    common: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "seed": 5, "temperature": 1, "max_tokens": 12}
    whole = client.chat.completions.create(**common, n=3)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    streamed, usage = ["", "", ""], None
    for chunk in client.chat.completions.create(**common, n=3, stream=True, stream_options={"include_usage": True}):
        for part in chunk.choices:
            streamed[part.index] += part.delta.content or ""
        usage = chunk.usage or usage
    assert streamed == texts
    alone = client.chat.completions.create(**{**common, "seed": branch_seed(5, 2)})
    assert alone.choices[0].message.content == texts[2]
    assert whole.usage is not None
    assert usage is not None
    assert alone.usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens == alone.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens > alone.usage.completion_tokens


def test_best_of(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Once upon a time", seed=1, temperature=1, max_tokens=8, n=2, best_of=4, logprobs=0
    )
    sums = [sum(choice.logprobs.token_logprobs or []) for choice in answer.choices if choice.logprobs]  # type: ignore[arg-type]
    scores = [choice.octavo["score"] for choice in answer.choices]  # type: ignore[attr-defined]
    assert scores == pytest.approx(sums)
    assert scores[0] >= scores[1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 32


def test_beam_search_finds_what_is_at_least_as_likely_as_the_greedy_text(client: openai.OpenAI) -> None:
    common: dict[str, Any] = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8}
    beams: dict[str, Any] = {"use_beam_search": True, "best_of": 4, "length_penalty": 0.0}
    found = client.completions.create(**common, n=4, extra_body=beams)
    scores = [choice.octavo["score"] for choice in found.choices]  # type: ignore[attr-defined]
    assert scores == sorted(scores, reverse=True)
    assert len({choice.text for choice in found.choices}) == 4
    greedy = client.completions.create(**common, temperature=0, logprobs=0).choices[0]
    assert greedy.logprobs is not None
    assert scores[0] >= sum(greedy.logprobs.token_logprobs or []) - 1e-3
    assert "Paris" in found.choices[0].text


def test_echo_with_logprobs(client: openai.OpenAI) -> None:
    prompt = "Zoë says: one, two, three, four"
    common: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 4, "logprobs": 1}
    client.completions.create(**common)
    answer = client.completions.create(**common, echo=True)
    streamed = list(client.completions.create(**common, echo=True, stream=True))
    plain = client.completions.create(**common)
    (choice,) = answer.choices
    scores, tail = choice.logprobs, plain.choices[0].logprobs
    assert answer.usage is not None
    assert scores is not None
    assert tail is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert choice.text == prompt + plain.choices[0].text == "".join(chunk.choices[0].text for chunk in streamed)
    assert scores.tokens is not None
    assert scores.token_logprobs is not None
    assert tail.token_logprobs is not None
    assert scores.text_offset is not None
    assert scores.token_logprobs[0] is None
    assert scores.token_logprobs[answer.usage.prompt_tokens :] == tail.token_logprobs
    assert all(logprob <= 0 for logprob in scores.token_logprobs[1:])
    for offset, token in zip(scores.text_offset, scores.tokens, strict=True):
        assert token.startswith("bytes:") or choice.text[offset:].startswith(token)
    joined = [one for chunk in streamed for one in chunk.choices[0].logprobs.token_logprobs or []]  # type: ignore[union-attr]
    assert joined == scores.token_logprobs


def test_cancelling_a_stream_frees_its_blocks(client: openai.OpenAI, address: str) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="Count:", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    for _, _ in zip(range(3), stream, strict=False):
        pass
    stream.close()
    while (status := kv_status(address))["running"]:
        time.sleep(0.01)
    assert (status["waiting"], status["used_blocks"]) == (0, 0)
    assert status["free_blocks"] + status["cached_blocks"] == status["num_blocks"]


def test_errors_reach_the_client_as_its_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="smollm2"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="suffix is not supported") as caught:
        client.completions.create(model=MODEL, prompt="x", suffix="y")
    assert (caught.value.param, caught.value.code) == ("suffix", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError, match="at most 64 requests run at once") as caught:
        client.completions.create(model=MODEL, prompt="x", n=65)
    assert (caught.value.param, caught.value.code) == ("n", "invalid_value")
    with pytest.raises(openai.BadRequestError, match="best_of 4 above n 2") as caught:
        client.completions.create(model=MODEL, prompt="x", n=2, best_of=4, stream=True)
    assert (caught.value.param, caught.value.code) == ("stream", "invalid_value")
    with pytest.raises(openai.BadRequestError, match="context of 1024 tokens") as caught:
        client.completions.create(model=MODEL, prompt="x", max_tokens=5000)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(model=MODEL, messages=QUESTION, response_format={"type": "json_object"})
