"""POST /v1/completions: prompts of every shape, streams, usage, log-probabilities, stops."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.engine.tokenizer import Tokenizer
from octavo.server.config import ServerConfig
from tests.engine.engine_case import SayingExecutor, tokens_of
from tests.server.http_case import MODEL, events_of, model_info, run, served


def test_answer_has_openais_shape(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer, SayingExecutor()) as server:
            answer = await server.complete(model=MODEL, max_tokens=5)
            assert answer.pop("id").startswith("cmpl-")
            assert answer.pop("created") > 0
            assert answer == {
                "object": "text_completion",
                "model": MODEL,
                "choices": [
                    {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length", "stop_reason": None}
                ],
                "usage": {
                    "prompt_tokens": 9,
                    "completion_tokens": 5,
                    "total_tokens": 14,
                    "prompt_tokens_details": {"cached_tokens": 0},
                },
            }

    run(work)


def test_default_is_16_tokens(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            assert (await server.complete())["usage"]["completion_tokens"] == 16

    run(work)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abc"]),
        (tokens_of("abc"), ["abc"]),
        (["abc", "de"], ["abc", "de"]),
        ([tokens_of("abc"), tokens_of("de")], ["abc", "de"]),
        (["abc", tokens_of("de"), "f"], ["abc", "de", "f"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_every_shape(tokenizer: Tokenizer, prompt: Any, texts: list[str], stream: bool) -> None:
    async def work() -> None:
        async with served(tokenizer, SayingExecutor()) as server:
            body = {"prompt": prompt, "echo": True, "max_tokens": 5, "stream": stream}
            answer = await server.post("/v1/completions", body)
            assert answer.status_code == 200, answer.text
            said = [""] * len(texts)
            reasons: list[list[str]] = [[] for _ in texts]
            payloads = events_of(answer.text)[:-1] if stream else [answer.json()]
            for payload in payloads:
                for choice in payload["choices"]:
                    said[choice["index"]] += choice["text"]
                    if choice["finish_reason"] is not None:
                        reasons[choice["index"]].append(choice["finish_reason"])
            assert said == [text + "Hello" for text in texts]
            assert reasons == [["length"]] * len(texts)

    run(work)


def test_stream_with_usage(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer, SayingExecutor("Grüße 👋🏽")) as server:
            body = {
                "prompt": ["one", "two"],
                "max_tokens": 64,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            answer = await server.post("/v1/completions", body)
            assert answer.headers["content-type"].startswith("text/event-stream")
            *chunks, usage, done = events_of(answer.text)
            assert done == "[DONE]"
            assert usage["choices"] == []
            output = 2 * (len("Grüße 👋🏽".encode()) + 1)
            assert usage["usage"] == {
                "prompt_tokens": 6,
                "completion_tokens": output,
                "total_tokens": 6 + output,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
            for index in (0, 1):
                texts = [choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
                assert "".join(texts) == "Grüße 👋🏽"
            assert all(chunk["usage"] is None for chunk in chunks)
            assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1

    run(work)


def test_stream_without_usage_has_none(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer, SayingExecutor()) as server:
            answer = await server.post("/v1/completions", {"prompt": "x", "stream": True})
            *chunks, done = events_of(answer.text)
            assert done == "[DONE]"
            assert not any("usage" in chunk for chunk in chunks)

    run(work)


def test_cached_tokens_are_reported(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        prompt = "The same words for everybody, and enough of them for some blocks."
        async with served(tokenizer) as server:
            cold = await server.complete(prompt=prompt, seed=1)
            warm = await server.complete(prompt=prompt, seed=1)
            assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) // 16 * 16 - 16
            assert warm["usage"]["prompt_tokens"] == cold["usage"]["prompt_tokens"] == len(prompt)
            assert warm["choices"] == cold["choices"]

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(tokenizer: Tokenizer, stream: bool) -> None:
    async def work() -> None:
        async with served(tokenizer, SayingExecutor("é!")) as server:
            body = {"prompt": "x", "logprobs": 2, "max_tokens": 3, "stream": stream}
            answer = await server.post("/v1/completions", body)
            payloads = events_of(answer.text)[:-1] if stream else [answer.json()]
            joined: dict[str, list[Any]] = {}
            for payload in payloads:
                for name, values in payload["choices"][0]["logprobs"].items():
                    joined.setdefault(name, []).extend(values)
            first, second = (f"bytes:\\x{byte:02x}" for byte in "é".encode())
            assert joined["tokens"] == [first, second, "!"]
            assert joined["token_logprobs"] == [-0.25] * 3
            assert joined["text_offset"] == [0, 0, 1]
            assert joined["top_logprobs"][0] == {first: -0.25, " ": -2.0}
            assert joined["top_logprobs"][2] == {"!": -0.25, " ": -2.0}

    run(work)


def test_logprobs_0_gives_the_drawn_token_alone(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer, SayingExecutor("ab")) as server:
            answer = await server.complete(logprobs=0, max_tokens=2)
            assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.25}, {"b": -0.25}]

    run(work)


@pytest.mark.parametrize("stop", ["world", ["nothing", "world"]])
@pytest.mark.parametrize("stream", [False, True])
def test_stop(tokenizer: Tokenizer, stop: Any, stream: bool) -> None:
    async def work() -> None:
        async with served(tokenizer, SayingExecutor()) as server:
            answer = await server.post("/v1/completions", {"prompt": "x", "stop": stop, "stream": stream})
            payloads = events_of(answer.text)[:-1] if stream else [answer.json()]
            assert "".join(payload["choices"][0]["text"] for payload in payloads) == "Hello, "
            assert payloads[-1]["choices"][0]["finish_reason"] == "stop"
            assert payloads[-1]["choices"][0]["stop_reason"] == "world"

    run(work)


def test_the_models_own_sampling_advice_is_the_default(tokenizer: Tokenizer) -> None:
    seen = []

    class Spy(SayingExecutor):
        def execute(self, plan: Any) -> Any:
            seen.extend(row.sample.params for row in plan.rows if row.sample is not None)
            return super().execute(plan)

    async def work() -> None:
        info = model_info(default_sampling={"temperature": 0.2, "top_k": 50, "repetition_penalty": 1.1})
        async with served(tokenizer, Spy(), info=info) as server:
            await server.complete(max_tokens=1)
            await server.complete(max_tokens=1, temperature=0, top_k=10**30, top_p=0.5)
        async with served(tokenizer, Spy()) as server:
            await server.complete(max_tokens=1)

    run(work)
    advised, chosen, plain = seen
    assert (advised.temperature, advised.top_k, advised.repetition_penalty) == (0.2, 50, 1.1)
    assert (chosen.temperature, chosen.top_k, chosen.top_p) == (0.0, 258, 0.5)
    assert (plain.temperature, plain.top_k, plain.top_p) == (1.0, 0, 1.0)


def test_every_sampling_field_arrives(tokenizer: Tokenizer) -> None:
    seen: list[Any] = []

    class Spy(SayingExecutor):
        def execute(self, plan: Any) -> Any:
            seen.extend(row.sample for row in plan.rows if row.sample is not None)
            return super().execute(plan)

    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.3,
        "min_tokens": 1,
        "max_tokens": 2,
        "seed": 12,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "kv_policy": "streaming:4,64,32",
    }

    async def work() -> None:
        extra = {"logit_bias": {"3": -100, "1": 2.5}, "stop_token_ids": [9], "stop": "zzz"}
        accepted = {"user": "me", "priority": 3, "prompt_cache_key": "k", "cache_salt": "s", "n": 1, "best_of": 1}
        async with served(tokenizer, Spy()) as server:
            await server.complete(**fields, **extra, **accepted, use_beam_search=False, suffix=None, model="alias")

    run(work)
    params = seen[0].params
    assert {name: getattr(params, name) for name in fields} == fields
    assert (params.logit_bias, params.stop_token_ids, params.stop) == (((1, 2.5), (3, -100.0)), (9,), ("zzz",))
    assert seen[0].seed == 12


def test_too_many_prompts(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer, config=ServerConfig(max_prompts=2)) as server:
            answer = await server.post("/v1/completions", {"prompt": ["a", "b", "c"]})
            assert answer.status_code == 400
            assert "3 prompts" in answer.json()["error"]["message"]

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_one_prompt_of_many_that_can_never_fit_refuses_all(tokenizer: Tokenizer, stream: bool) -> None:
    async def work() -> None:
        async with served(tokenizer, num_blocks=8) as server:
            body = {"prompt": ["a", "b" * 120], "stream": stream, "max_tokens": 100}
            answer = await server.post("/v1/completions", body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert "needs 14 KV blocks" in error["message"]
            assert "the pool has 8" in error["message"]
            assert error["code"] == "context_length_exceeded"

    run(work)
