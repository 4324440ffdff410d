"""Keys, tenants and request ids: who may ask, and whose cache it is (F20)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError
from octavo.server.config import ServerConfig
from octavo.server.tenant import ApiKeys, namespace
from tests.server.http_case import run, served

KEYS = ServerConfig(api_keys=("key-one", "key-two"))
PROMPT = "A secret that one tenant has, long enough to fill some blocks of the cache."


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "key-one"},
        {"authorization": "Basic key-one"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer key-on"},
        {"authorization": "Bearer key-one2"},
        {"authorization": "Bearer key-one key-two"},
        {"authorization": b"Bearer \xff\xfe"},
        {"x-api-key": "key-one"},
    ],
)
def test_without_a_key_only_health_is_open(tokenizer: Tokenizer, headers: dict[str, Any]) -> None:
    async def work() -> None:
        async with served(tokenizer, config=KEYS) as server:
            assert (await server.http.get("/health", headers=headers)).status_code == 200
            for method, path in [
                ("POST", "/v1/completions"),
                ("POST", "/v1/chat/completions"),
                ("POST", "/tokenize"),
                ("POST", "/v1/kv/reset"),
                ("GET", "/v1/models"),
                ("GET", "/v1/kv/status"),
                ("GET", "/metrics"),
                ("GET", "/version"),
                ("GET", "/health/"),
                ("GET", "/nothing"),
            ]:
                answer = await server.http.request(method, path, headers=headers)
                assert answer.status_code == 401, (path, answer.text)
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"

    run(work)


@pytest.mark.parametrize("key", KEYS.api_keys)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_every_key_opens(tokenizer: Tokenizer, key: str, scheme: str) -> None:
    async def work() -> None:
        async with served(tokenizer, config=KEYS) as server:
            answer = await server.http.get("/v1/models", headers={"authorization": f"{scheme} {key}"})
            assert answer.status_code == 200

    run(work)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_tenant_hits_its_own_prefix_and_never_anothers(tokenizer: Tokenizer, path: str) -> None:
    prompt = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPT}]}

    async def work() -> None:
        async with served(tokenizer, config=KEYS, num_blocks=256) as server:

            async def cached(key: str, salt: str | None) -> int:
                body = {**prompt, "max_tokens": 1, "cache_salt": salt}
                answer = await server.post(path, body, headers=bearer(key))
                assert answer.status_code == 200, answer.text
                return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

            one = ApiKeys(KEYS.api_keys).tenant_of("Bearer key-one")
            salts = [None, "", "a", "key-one", one, namespace(one or "", None), namespace(one or "", "a")]
            for key, salt in itertools.product(KEYS.api_keys, salts):
                assert await cached(key, salt) == 0, (key, salt)
            for key, salt in itertools.product(KEYS.api_keys, salts):
                assert await cached(key, salt) >= 64, (key, salt)

    run(work)


def test_no_two_pairs_of_tenant_and_salt_share_a_namespace() -> None:
    words = ["", "a", "b", "ab", "+1:a", "-", "a+1:b", "\ud800"]
    tenants = [word for word in words if word != "\ud800"]
    pairs = list(itertools.product(tenants, [None, *words]))
    assert len({namespace(tenant, salt) for tenant, salt in pairs}) == len(pairs)
    assert namespace("", None) == ""


def test_keys_are_not_kept_as_they_are() -> None:
    keys = ApiKeys(("a-long-secret",))
    assert "a-long-secret" not in repr(vars(keys))
    assert "a-long-secret" not in (keys.tenant_of("Bearer a-long-secret") or "")


@pytest.mark.parametrize("key", ["", "two words", "ümlaut", "a\tb"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="api key"):
        ServerConfig(api_keys=(key,))


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-123", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ("<script>", False), ("", False)],
)
def test_request_ids(tokenizer: Tokenizer, given: str, kept: bool) -> None:
    async def work() -> None:
        async with served(tokenizer, config=KEYS) as server:
            for path in ("/health", "/v1/models", "/nothing"):  # an answer of an endpoint, of the gate, and a 404
                for headers in ({}, bearer("key-one")):
                    answer = await server.http.get(path, headers={**headers, "x-request-id": given})
                    assert (answer.headers["x-request-id"] == given) == kept
                    assert answer.headers["x-request-id"]

    run(work)


def test_request_ids_differ(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            ids = [(await server.http.get("/health")).headers["x-request-id"] for _ in range(3)]
            assert len(set(ids)) == 3

    run(work)
