"""SmolLM2 on the native kernels behind a real socket, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx

from octavo import SchedulerOptions, load
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.executor.config import ExecutorConfig
from octavo.server.config import ServerConfig
from octavo.server.run import HttpServer, bind_socket
from octavo.server.served_model import ServedModel

MODEL = "smollm2"


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
            max_request_tokens=loaded.plan.max_request_tokens,
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


def kv_status(address: str) -> dict[str, Any]:
    return dict(httpx.get(f"{address}/v1/kv/status", timeout=60).json())
