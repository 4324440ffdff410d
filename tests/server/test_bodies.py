"""Whatever bytes arrive, the answer is 200 or a 4xx in the API's shape, and the server lives on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.engine.tokenizer import Tokenizer
from octavo.server.config import ServerConfig
from octavo.server.fields import ChatFields, CommonFields, CompletionFields
from octavo.testing.checking_executor import CheckingExecutor
from tests.engine.engine_case import BLOCK_SIZE, VOCAB_SIZE
from tests.server.http_case import run, served

PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/kv/reset"]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "system", "assistant", "tool"]) | LEAVES,
            "content": st.text(max_size=20) | VALUES,
        }
    ),
    max_size=3,
)
NAMES = sorted(
    {*CommonFields.__slots__, *ChatFields.__slots__, *CompletionFields.__slots__, "tokens", "tools", "n"}  # type: ignore[attr-defined]
    - {"prompt", "messages", "max_tokens"}
)
BODIES = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 4) | VALUES},
    optional={
        "prompt": st.text(max_size=30) | st.lists(st.integers(-1, 300), max_size=5) | VALUES,
        "messages": MESSAGES | VALUES,
        **dict.fromkeys(NAMES, VALUES),
    },
)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.data_too_large, HealthCheck.too_slow],
)
@given(st.lists(st.tuples(st.sampled_from(PATHS), BODIES), min_size=10, max_size=10))
def test_fuzzed_fields_never_give_500(tokenizer: Tokenizer, calls: list[tuple[str, dict[str, Any]]]) -> None:
    async def work() -> None:
        executor = CheckingExecutor(BLOCK_SIZE, vocab_size=VOCAB_SIZE, keep_plans=False)  # it scores any prompt
        async with served(tokenizer, executor) as server:
            for path, body in calls:
                answer = await server.http.post(path, content=json.dumps(body))
                assert answer.status_code in (200, 400, 404), (path, body, answer.text)
                if answer.status_code != 200:
                    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert (await server.http.get("/health")).status_code == 200

    run(work)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.data_too_large, HealthCheck.too_slow],
)
@given(st.lists(st.binary(max_size=200) | st.text(max_size=50).map(str.encode), min_size=10, max_size=10))
def test_fuzzed_bytes_never_give_500(tokenizer: Tokenizer, bodies: list[bytes]) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            for body in bodies:
                answer = await server.http.post("/v1/completions", content=body)
                assert answer.status_code == 400, (body, answer.text)

    run(work)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "prompt is missing"),
        (b"{", "not valid JSON"),
        (b"[]", "JSON array"),
        (b"null", "JSON null"),
        (b'"x"', "JSON string"),
        (b"1", "JSON number"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "\\ud800 and more"}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"temperature": 1e999}', "not valid JSON"),
        (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", "deeper than 64"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deeper than 64"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "deeper than 64"),
    ],
)
def test_broken_bodies(tokenizer: Tokenizer, body: bytes, words: str) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            answer = await server.http.post("/v1/completions", content=body)
            assert answer.status_code == 400, answer.text
            assert words in answer.json()["error"]["message"]

    run(work)


def test_a_body_that_does_not_come_is_408(tokenizer: Tokenizer) -> None:
    async def chunks() -> Any:
        yield b'{"prompt": '
        await asyncio.Event().wait()

    async def work() -> None:
        async with served(tokenizer, config=ServerConfig(body_timeout_s=0.2)) as server:
            answer = await server.http.post("/v1/completions", content=chunks())
            assert answer.status_code == 408
            assert answer.headers["connection"] == "close"
            assert answer.json()["error"]["code"] == "body_timeout"
            assert "within 0.2 s" in answer.json()["error"]["message"]
            await server.complete()

    run(work)


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_beyond_the_limit_is_413(tokenizer: Tokenizer, announced: bool) -> None:
    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 100

    async def work() -> None:
        async with served(tokenizer, config=ServerConfig(max_body_bytes=1000)) as server:
            answer = await server.http.post("/v1/completions", content=b" " * 2000 if announced else chunks())
            assert answer.status_code == 413
            assert "1000 bytes" in answer.json()["error"]["message"]

    run(work)
