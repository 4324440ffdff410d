"""A served engine without a model, and a client for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.applications import Starlette

from octavo.core.step import Executor
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.chat_template import ChatTemplate
from octavo.engine.config import EngineConfig
from octavo.engine.tokenizer import Tokenizer
from octavo.server.app import create_app
from octavo.server.config import ServerConfig
from octavo.server.served_model import ServedModel
from tests.engine.engine_case import NUM_PRINTABLE, VOCAB_SIZE, new_engine

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MODEL = "tiny/bytes"


@dataclass(frozen=True)
class Served:
    engine: AsyncEngine
    app: Starlette
    http: httpx.AsyncClient

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **options)

    async def complete(self, **fields: Any) -> dict[str, Any]:
        answer = await self.post("/v1/completions", {"prompt": "A prompt.", **fields})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def chat(self, **fields: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": "Say hello."}], **fields}
        answer = await self.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def kv(self, **options: Any) -> dict[str, Any]:
        return dict((await self.http.get("/v1/kv/status", **options)).json())


def model_info(**changes: Any) -> ServedModel:
    fields: dict[str, Any] = {
        "names": (MODEL, "alias"),
        "max_model_len": 256,
        "max_request_tokens": 256,
        "vocab_size": VOCAB_SIZE,
        "chat_template": ChatTemplate(TEMPLATE),
        "created": 1_700_000_000,
        "digest": "d" * 64,
        "kv_cache_dtype": "f32",
        "weights_dtype": "f32",
        "degraded": ("a reason",),
    }
    return ServedModel(**{**fields, **changes})


@asynccontextmanager
async def served(
    tokenizer: Tokenizer,
    executor: Executor | None = None,
    *,
    config: ServerConfig | None = None,
    info: ServedModel | None = None,
    engine_config: EngineConfig | None = None,
    **limits: int | bool,
) -> AsyncIterator[Served]:
    """The application in this process, without a socket. At the end no block may be held any more."""
    engine = new_engine(tokenizer, executor, config=engine_config, **limits)
    app = create_app(engine, info or model_info(), config or ServerConfig())
    engine.start()
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        try:
            yield Served(engine, app, http)
        finally:
            await engine.shutdown(0)
    if engine.state == "stopped":
        core = (await engine.status()).core
        assert (core.running, core.waiting, core.used_blocks) == (0, 0, 0)
        assert core.free_blocks + core.cached_blocks == core.num_blocks


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await work()

    asyncio.run(main())


def events_of(text: str) -> list[Any]:
    """The payloads of server-sent events; "[DONE]" stays a string."""
    assert text.endswith("\n\n")
    payloads = []
    for piece in text[:-2].split("\n\n"):
        assert piece.startswith("data: "), piece
        assert "\n" not in piece
        payload = piece.removeprefix("data: ")
        payloads.append(payload if payload == "[DONE]" else json.loads(payload))
    return payloads


__all__ = ["MODEL", "NUM_PRINTABLE", "Served", "events_of", "model_info", "run", "served"]
