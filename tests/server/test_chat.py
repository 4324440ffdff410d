"""POST /v1/chat/completions: messages, streams, limits, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.engine.tokenizer import Tokenizer
from octavo.server.config import ServerConfig
from tests.engine.engine_case import SayingExecutor
from tests.server.http_case import MODEL, events_of, model_info, run, served

PROMPT = "user: Say hello.\nassistant: "


def test_answer_has_openais_shape(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer, SayingExecutor()) as server:
            answer = await server.chat()
            assert answer.pop("id").startswith("chatcmpl-")
            assert answer.pop("created") > 0
            message = {"role": "assistant", "content": "Hello, world.", "refusal": None}
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
            assert answer == {
                "object": "chat.completion",
                "model": MODEL,
                "choices": [choice],
                "usage": {
                    "prompt_tokens": len(PROMPT),
                    "completion_tokens": 14,
                    "total_tokens": len(PROMPT) + 14,
                    "prompt_tokens_details": {"cached_tokens": 0},
                },
            }

    run(work)


def test_stream(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer, SayingExecutor("Zoë 👋")) as server:
            body = {
                "messages": [{"role": "user", "content": "x"}],
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            answer = await server.post("/v1/chat/completions", body)
            first, *chunks, usage, done = events_of(answer.text)
            assert done == "[DONE]"
            assert first["object"] == "chat.completion.chunk"
            assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Zoë 👋"
            assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
            assert usage["choices"] == []
            assert usage["usage"]["completion_tokens"] == len("Zoë 👋".encode()) + 1

    run(work)


@pytest.mark.parametrize(("pool", "expected"), [(256, 256), (100, 100)])
def test_default_limit_is_the_room_that_is_left(tokenizer: Tokenizer, pool: int, expected: int) -> None:
    async def work() -> None:
        async with served(tokenizer, info=model_info(max_request_tokens=pool)) as server:
            usage = (await server.chat())["usage"]
            assert usage["total_tokens"] == expected

    run(work)


def test_a_prompt_that_leaves_no_room_is_refused_with_the_arithmetic(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            body = {"messages": [{"role": "user", "content": "x" * 300}]}
            answer = await server.post("/v1/chat/completions", body)
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert error["param"] == "messages"
            assert "context of 256 tokens" in error["message"]

    run(work)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(tokenizer: Tokenizer, name: str) -> None:
    async def work() -> None:
        async with served(tokenizer, SayingExecutor()) as server:
            assert (await server.chat(**{name: 3}))["choices"][0]["message"]["content"] == "Hel"
            body = {"messages": [{"role": "user", "content": "x"}]}
            for value, words in ((0, "at least 1"), (999, "context of 256")):
                answer = await server.post("/v1/chat/completions", {**body, name: value})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
                assert words in answer.json()["error"]["message"]
            answer = await server.post("/v1/chat/completions", {**body, "max_tokens": 1, "max_completion_tokens": 2})
            assert answer.status_code == 400

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(tokenizer: Tokenizer, stream: bool) -> None:
    async def work() -> None:
        async with served(tokenizer, SayingExecutor("é!")) as server:
            body = {
                "messages": [{"role": "user", "content": "x"}],
                "logprobs": True,
                "top_logprobs": 2,
                "max_tokens": 3,
                "stream": stream,
            }
            answer = await server.post("/v1/chat/completions", body)
            payloads = events_of(answer.text)[:-1] if stream else [answer.json()]
            content: list[Any] = []
            for payload in payloads:
                content += (payload["choices"][0]["logprobs"] or {"content": []})["content"]
            assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [0x21]]
            assert [entry["token"] for entry in content] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
            assert [entry["logprob"] for entry in content] == [-0.25] * 3
            assert content[2]["top_logprobs"] == [
                {"token": "!", "logprob": -0.25, "bytes": [0x21]},
                {"token": " ", "logprob": -2.0, "bytes": [0x20]},
            ]

    run(work)


def test_parts_of_text_and_the_developers_role(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        messages = [
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
            {"role": "user", "content": "Hi", "name": "Ann"},
            {"role": "assistant", "content": "Ho", "tool_calls": None, "refusal": None},
            {"role": "user", "content": "Hi"},
        ]
        async with served(tokenizer) as server:
            answer = await server.post("/tokenize", {"messages": messages})
            text = (await server.post("/detokenize", {"tokens": answer.json()["tokens"]})).json()["prompt"]
            assert text == "system: Be kind.\nuser: Hi\nassistant: Ho\nuser: Hi\nassistant: "

    run(work)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "missing"),
        ([], "at least one"),
        ([{"role": "tool", "content": "x"}], "messages[0].role 'tool' is not supported"),
        ([{"role": "boss", "content": "x"}], "messages[0].role must be one of"),
        ([{"content": "x"}], "messages[0].role must be one of"),
        ([{"role": "user"}], "messages[0].content must be"),
        ([{"role": "user", "content": 5}], "messages[0].content must be"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "type 'image_url'"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "type 'input_audio'"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x", "colour": "red"}], "unknown field 'colour'"),
        (
            [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
            "messages[0].tool_calls is not supported",
        ),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        (["x"], "messages[0]"),
        ("x", "messages"),
    ],
)
def test_wrong_messages_are_named(tokenizer: Tokenizer, messages: Any, words: str) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            answer = await server.post("/v1/chat/completions", {"messages": messages})
            error = answer.json()["error"]
            assert answer.status_code == 400, answer.text
            assert words in error["message"]
            assert error["param"].startswith("messages")

    run(work)


def test_a_model_without_a_template_says_so(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer, info=model_info(chat_template=None)) as server:
            answer = await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
            assert answer.status_code == 400
            assert "--chat-template" in answer.json()["error"]["message"]

    run(work)


def test_a_model_whose_template_is_broken_says_how(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        info = model_info(chat_template=None, chat_error="the chat template is broken at line 3")
        async with served(tokenizer, info=info) as server:
            answer = await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith("the chat template is broken at line 3")
            await server.complete()

    run(work)


def test_too_many_messages(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer, config=ServerConfig(max_messages=2)) as server:
            answer = await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 3})
            assert answer.status_code == 400
            assert "3 messages" in answer.json()["error"]["message"]

    run(work)
