"""An API field that is not supported is a 400 that names it, never ignored; so is a wrong value."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.engine.tokenizer import Tokenizer
from tests.server.http_case import run, served

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
COMPLETION = {"prompt": "x", "max_tokens": 2}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}

NOT_SUPPORTED: list[tuple[str, Any]] = [
    ("suffix", "the end"),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "auto"),
    ("parallel_tool_calls", True),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "alloy"}),
    ("prediction", {"type": "content"}),
    ("reasoning_effort", "high"),
    ("verbosity", "low"),
    ("web_search_options", {}),
    ("store", True),
    ("metadata", {"a": "b"}),
    ("service_tier", "flex"),
    ("guided_json", {}),
    ("structured_outputs", {"regex": "a"}),
    ("skip_special_tokens", False),
    ("continue_final_message", True),
    ("chat_template", "{{ 1 }}"),
    ("prompt_logprobs", 1),
    ("allowed_token_ids", [1]),
]

NEUTRAL: list[tuple[str, Any]] = [
    ("n", 1),
    ("best_of", 1),
    ("use_beam_search", False),
    ("length_penalty", 1),
    ("early_stopping", False),
    ("tools", []),
    ("tool_choice", "none"),
    ("response_format", {"type": "text"}),
    ("modalities", ["text"]),
    ("store", False),
    ("metadata", {}),
    ("service_tier", "auto"),
    ("logit_bias", {}),
    ("user", "someone"),
    ("safety_identifier", "someone"),
    ("prompt_cache_key", "key"),
    ("cache_salt", "salt"),
    ("priority", -1),
    ("stream_options", None),
]

WRONG: list[tuple[str, Any, str]] = [
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", "5", "expected `int"),
    ("max_tokens", 1.5, "expected `int"),
    ("max_tokens", True, "got `bool`"),
    ("max_tokens", 10**40, "context of 256"),
    ("min_tokens", 3, "at most 2"),
    ("min_tokens", -1, "at least 0"),
    ("temperature", -0.1, "at least 0"),
    ("temperature", 1000, "at most 100"),
    ("temperature", "hot", "expected `float"),
    ("top_p", 0, "above 0"),
    ("top_p", 1.1, "at most 1"),
    ("top_k", -2, "at least -1"),
    ("min_p", 2, "at most 1"),
    ("repetition_penalty", 0, "above 0"),
    ("presence_penalty", 3, "at most 2"),
    ("frequency_penalty", -3, "at least -2"),
    ("seed", 2**70, "at most"),
    ("seed", "x", "expected `int"),
    ("stop", ["a"] * 17, "at most 16"),
    ("stop", "", "none of them empty"),
    ("stop", 5, "expected"),
    ("stop", [5], "expected `str`"),
    ("stop", "x" * 5000, "at most 1024"),
    ("stop_token_ids", [258], "from 0 to 257"),
    ("stop_token_ids", [-1], "from 0 to 257"),
    ("stop_token_ids", [0] * 2000, "at most 1024"),
    ("logit_bias", {"258": 1}, "from 0 to 257"),
    ("logit_bias", {"x": 1}, "decimal digits"),
    ("logit_bias", {"-1": 1}, "decimal digits"),
    ("logit_bias", {"1": 101}, "at most 100"),
    ("logit_bias", {"1": 1, "01": 2}, "twice"),
    ("logit_bias", [1], "expected `object"),
    ("priority", 2**40, "lower is sooner"),
    ("stream", "yes", "expected `bool"),
    ("stream_options", {"include_usage": True}, "only allowed with stream"),
    ("cache_salt", 5, "expected `str"),
    ("ignore_eos", 1, "expected `bool"),
    ("model", 5, "expected `str"),
    ("kv_policy", "h3o", "must be all, one of streaming, h2o, snapkv"),
    ("kv_policy", 4, "expected `str"),
]


@pytest.mark.parametrize("path", PATHS)
def test_every_unsupported_field_is_refused_by_name(tokenizer: Tokenizer, path: str) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            for name, value in NOT_SUPPORTED:
                answer = await server.post(path, {**PATHS[path], name: value})
                error = answer.json()["error"]
                assert answer.status_code == 400, (name, answer.text)
                assert error["param"] == name
                assert error["code"] == "unsupported_parameter"
                assert error["message"].startswith(f"{name} is not supported")
            assert (await server.kv())["queries_tokens"] == 0

    run(work)


@pytest.mark.parametrize("path", PATHS)
def test_what_asks_for_nothing_is_accepted(tokenizer: Tokenizer, path: str) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            for name, value in NEUTRAL:
                answer = await server.post(path, {**PATHS[path], name: value})
                assert answer.status_code == 200, (name, answer.text)
            for name, _ in NOT_SUPPORTED:
                answer = await server.post(path, {**PATHS[path], name: None})
                assert answer.status_code == 200, (name, answer.text)

    run(work)


@pytest.mark.parametrize("path", PATHS)
def test_wrong_values_are_named(tokenizer: Tokenizer, path: str) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            for name, value, words in WRONG:
                answer = await server.post(path, {**PATHS[path], name: value})
                error = answer.json()["error"]
                assert answer.status_code == 400, (name, value, answer.text)
                assert error["param"] == name, (name, value, error)
                assert words in error["message"], (name, value, error)
                assert error["type"] == "invalid_request_error"

    run(work)


@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize", "/v1/kv/reset"])
def test_unknown_fields_are_named(tokenizer: Tokenizer, path: str) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            answer = await server.post(path, {**PATHS.get(path, {}), "temprature": 1})
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")

    run(work)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "messages", [{"role": "user", "content": "x"}]),
        ("/v1/completions", "top_logprobs", 1),
        ("/v1/completions", "max_completion_tokens", 1),
        ("/v1/chat/completions", "prompt", "x"),
        ("/v1/chat/completions", "echo", True),
    ],
)
def test_a_field_of_the_other_endpoint_is_unknown_here(tokenizer: Tokenizer, path: str, field: str, value: Any) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            answer = await server.post(path, {**PATHS[path], field: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)

    run(work)


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"echo": True, "logprobs": 21}, "logprobs", "at most 20"),
        ({"logprobs": 21}, "logprobs", "at most 20"),
        ({"logprobs": True}, "logprobs", "got `bool`"),
        ({"prompt": None}, "prompt", "missing"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": []}, "prompt", "no tokens"),
        ({"prompt": [[]]}, "prompt", "no tokens"),
        ({"prompt": {"a": 1}}, "prompt", "must be a string"),
        ({"prompt": [1.5]}, "prompt", "expected `int`"),
        ({"prompt": [True]}, "prompt", "expected `int`"),
        ({"prompt": [1, "a"]}, "prompt", "expected `int`"),
        ({"prompt": ["a", 1]}, "prompt", "expected `array`"),
        ({"prompt": [258]}, "prompt", "from 0 to 257"),
        ({"prompt": [-1]}, "prompt", "from 0 to 257"),
        ({"prompt": [2**70]}, "prompt", "from 0 to 257"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options", "only include_usage"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "true or false"),
    ],
)
def test_wrong_completions(tokenizer: Tokenizer, changes: dict[str, Any], param: str, words: str) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            answer = await server.post("/v1/completions", {**COMPLETION, **changes})
            error = answer.json()["error"]
            assert answer.status_code == 400, answer.text
            assert error["param"] == param
            assert words in error["message"]

    run(work)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
    ],
)
def test_wrong_chat_logprobs(tokenizer: Tokenizer, changes: dict[str, Any], param: str) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            answer = await server.post("/v1/chat/completions", {**CHAT, **changes})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert param in answer.json()["error"]["message"]

    run(work)
