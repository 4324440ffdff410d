"""The official openai client against SmolLM2 on the native kernels, over a real socket."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.executor.config import ExecutorConfig
from octavo.llm import SchedulerOptions, load
from octavo.server.config import ServerConfig
from octavo.server.run import HttpServer, bind_socket
from octavo.server.served_model import ServedModel

MODEL = "smollm2"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]


class BackgroundServer:
    """The server in a thread of its own, so that the client may block as it does in life."""

    def __init__(self, path: Path) -> None:
        loaded = load(
            str(path),
            scheduler=SchedulerOptions(max_model_len=1024),
            executor=ExecutorConfig(kv_cache_memory=96 << 20, threads=2),
        )
        self.engine = AsyncEngine(loaded.core, loaded.tokenizer, EngineConfig(eos_token_ids=loaded.eos_token_ids))
        info = ServedModel(
            names=(MODEL,),
            max_model_len=loaded.max_model_len,
            max_request_tokens=min(loaded.max_model_len, loaded.plan.kv_tokens),
            vocab_size=loaded.vocab_size,
            chat_template=loaded.chat_template,
            default_sampling=loaded.default_sampling,
        )
        self._info = info
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: HttpServer | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def start(self) -> str:
        self._thread.start()
        assert self._ready.wait(60)
        assert self._server is not None
        return self._server.address

    def stop(self) -> None:
        assert self._loop is not None
        assert self._server is not None
        self._loop.call_soon_threadsafe(self._server.stop, "the end of the tests")
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        config = ServerConfig(port=0, shutdown_timeout_s=0)
        self._server = HttpServer(self.engine, self._info, config, bind_socket("127.0.0.1", 0))
        await self._server.run(lambda _: self._ready.set())


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


def kv_status(address: str) -> dict[str, Any]:
    return dict(httpx.get(f"{address}/v1/kv/status", timeout=60).json())


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
    prompts = ["One, two, three,", "Monday, Tuesday,", "The sky is"]
    together = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=8)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    for prompt, choice in zip(prompts, together.choices, strict=True):
        alone = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8, echo=True)
        assert alone.choices[0].text == prompt + choice.text
    assert " four" in together.choices[0].text
    assert "Wednesday" in together.choices[1].text
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
    with pytest.raises(openai.BadRequestError, match="n is not supported") as caught:
        client.completions.create(model=MODEL, prompt="x", n=2)
    assert (caught.value.param, caught.value.code) == ("n", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError, match="context of 1024 tokens") as caught:
        client.completions.create(model=MODEL, prompt="x", max_tokens=5000)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(model=MODEL, messages=QUESTION, response_format={"type": "json_object"})
