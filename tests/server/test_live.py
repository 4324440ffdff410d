"""The server on a real socket: disconnects, shutdown, signals, a taken port."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.core.status import CoreStatus
from octavo.core.step import Executor
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError
from octavo.server.config import ServerConfig
from octavo.server.run import HttpServer, ServeReport, bind_socket
from tests.engine.engine_case import (
    FailingExecutor,
    GatedExecutor,
    PacedExecutor,
    SayingExecutor,
    checking_executor,
    new_engine,
)
from tests.server.http_case import events_of, model_info, run

REPOSITORY = Path(__file__).parents[2]
LONG = {"prompt": "x" * 40, "max_tokens": 200}


@dataclass
class Live:
    server: HttpServer
    engine: AsyncEngine
    http: httpx.AsyncClient
    serving: asyncio.Task[ServeReport]

    async def steps_until(self, executor: GatedExecutor, reached: Callable[[CoreStatus], bool]) -> None:
        """Lets steps run, a few at a time, until the core is as wished."""
        while True:
            asking = asyncio.ensure_future(self.engine.status())
            while not asking.done():
                executor.let(1)
                await asyncio.sleep(0.001)
            if reached(asking.result().core):
                return


def is_idle(core: CoreStatus) -> bool:
    return (core.running, core.waiting, core.used_blocks) == (0, 0, 0)


@asynccontextmanager
async def live(tokenizer: Tokenizer, executor: Executor, **options: Any) -> AsyncIterator[Live]:
    config = options.pop("config", ServerConfig(port=0, shutdown_timeout_s=0))
    engine = new_engine(tokenizer, executor, **options)
    server = HttpServer(engine, model_info(), config, bind_socket("127.0.0.1", 0))
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(server.run(ready.set_result))
    async with httpx.AsyncClient(base_url=await ready, timeout=60) as http:
        try:
            yield Live(server, engine, http, serving)
        finally:
            server.stop("the end of the test")
            if isinstance(executor, GatedExecutor):
                executor.let(10_000)
    await serving


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(tokenizer: Tokenizer, stream: bool) -> None:
    """F11."""

    async def work() -> None:
        executor = GatedExecutor(checking_executor())
        async with live(tokenizer, executor) as served:
            executor.let(3)
            request = served.http.build_request("POST", "/v1/completions", json={**LONG, "stream": stream})
            sending = asyncio.ensure_future(served.http.send(request, stream=True))
            await asyncio.to_thread(executor.waiting.acquire)
            if stream:
                answer = await sending
                async for chunk in answer.aiter_bytes():
                    assert chunk.startswith(b"data: ")
                    break
                await answer.aclose()
            else:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            await served.steps_until(executor, is_idle)
            assert dict((await served.engine.status()).finished)["abort"] == 1

    run(work)


def test_a_client_that_leaves_while_it_waits_is_forgotten(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        executor = GatedExecutor(checking_executor())
        async with live(tokenizer, executor, max_num_seqs=1) as served:
            first = asyncio.ensure_future(served.http.post("/v1/completions", json=LONG))
            await asyncio.to_thread(executor.waiting.acquire)
            second = asyncio.ensure_future(served.http.post("/v1/completions", json=LONG))
            await served.steps_until(executor, lambda core: core.waiting == 1)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            await served.steps_until(executor, is_idle)
            assert (await first).status_code == 200
            assert dict((await served.engine.status()).finished) == {"stop": 0, "length": 1, "abort": 1, "error": 0}

    run(work)


def test_bytes_on_the_wire(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with live(tokenizer, SayingExecutor("Zoë 👋")) as served:
            answer = await served.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 20})
            assert answer.json()["choices"][0]["text"] == "Zoë 👋"
            body = {"prompt": "x", "max_tokens": 20, "stream": True}
            async with served.http.stream("POST", "/v1/completions", json=body) as streamed:
                assert streamed.headers["cache-control"] == "no-cache"
                assert streamed.headers["x-request-id"]
                payloads = events_of((await streamed.aread()).decode())
            assert "".join(chunk["choices"][0]["text"] for chunk in payloads[:-1]) == "Zoë 👋"
            assert payloads[-1] == "[DONE]"

    run(work)


def test_a_failure_in_a_running_stream_is_one_error_event_and_the_end(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        executor = GatedExecutor(FailingExecutor(SayingExecutor(), fails_in_step=4))
        async with live(tokenizer, executor) as served:
            body = {"prompt": ["x", "y"], "stream": True}
            executor.let(1)
            async with served.http.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                executor.let(10)
                *chunks, last = events_of((await answer.aread()).decode())
            said = [
                "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == at) for at in (0, 1)
            ]
            assert said == ["Hel", "Hel"]
            assert "on fire" in last["error"]["message"]
            assert last["error"]["type"] == "server_error"

    run(work)
    assert "on fire" in caplog.text


def test_shutdown_lets_a_running_stream_end_and_refuses_new_ones(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        executor = GatedExecutor(SayingExecutor())
        config = ServerConfig(port=0, shutdown_timeout_s=120)
        async with live(tokenizer, executor, config=config) as served:
            body = {"prompt": "x", "max_tokens": 64, "stream": True}
            running = asyncio.ensure_future(served.http.post("/v1/completions", json=body))
            idle = httpx.AsyncClient(base_url=served.server.address)
            assert (await idle.get("/health")).status_code == 200
            await asyncio.to_thread(executor.waiting.acquire)
            served.server.stop("the test")
            assert served.engine.state == "running"  # the task has not begun yet
            await asyncio.sleep(0)
            try:
                refused = await idle.post("/v1/completions", json={"prompt": "x"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_stopped")
                assert "the test" in refused.json()["error"]["message"]
                assert (await idle.get("/health")).json()["status"] == "draining"
            except httpx.TransportError:
                assert served.engine.state == "draining"  # the socket was closed before we came
            await idle.aclose()
            executor.let(100)
            *chunks, done = events_of((await running).text)
            assert done == "[DONE]"
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello, world."
            assert await served.serving == ServeReport("the test", 0)

    run(work)


def test_shutdown_aborts_what_does_not_end_in_time_and_says_why(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        executor = GatedExecutor(PacedExecutor(checking_executor(), 0.01))
        async with live(tokenizer, executor) as served:
            streamed = asyncio.ensure_future(served.http.post("/v1/completions", json={**LONG, "stream": True}))
            whole = asyncio.ensure_future(served.http.post("/v1/completions", json=LONG))
            await served.steps_until(executor, lambda core: core.running == 2)
            served.server.stop("the test")
            await asyncio.sleep(0)
            executor.let(10_000)
            *_, last = events_of((await streamed).text)
            assert "the test" in last["error"]["message"]
            assert "did not end within 0 s" in last["error"]["message"]
            answer = await whole
            assert answer.status_code == 503
            assert "did not end within 0 s" in answer.json()["error"]["message"]
            assert await served.serving == ServeReport("the test", 2)

    run(work)


def test_a_second_stop_does_not_wait(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        executor = GatedExecutor(checking_executor())
        async with live(tokenizer, executor, config=ServerConfig(port=0, shutdown_timeout_s=600)) as served:
            whole = asyncio.ensure_future(served.http.post("/v1/completions", json=LONG))
            await asyncio.to_thread(executor.waiting.acquire)
            served.server.stop("first")
            await asyncio.sleep(0)
            served.server.stop("second")
            await asyncio.sleep(0)
            executor.let(1)
            answer = await whole
            assert answer.status_code == 503
            assert "second came again" in answer.json()["error"]["message"]
            assert await served.serving == ServeReport("first", 1)

    run(work)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_access_log_is_there_when_asked_for(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, wanted: bool
) -> None:
    async def work() -> None:
        config = ServerConfig(port=0, shutdown_timeout_s=0, access_log=wanted)
        async with live(tokenizer, SayingExecutor(), config=config) as served:
            await served.http.get("/v1/models")

    with caplog.at_level("INFO"):
        run(work)
    assert ("GET /v1/models" in caplog.text) == wanted


def test_a_taken_port_is_known_before_anything_is_loaded() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127\.0\.0\.1 is taken .* --port"):
            bind_socket("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "words"), [("203.0.113.7", "no address of this machine"), ("no such host", "cannot be found")]
)
def test_a_host_that_is_not_here(host: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bind_socket(host, 0)


SCRIPT = """
import sys, tempfile
from pathlib import Path
from octavo.server.config import ServerConfig
from octavo.server.run import serve
from tests.engine.engine_case import new_engine, tiny_tokenizer
from tests.server.http_case import model_info
with tempfile.TemporaryDirectory() as directory:
    engine = new_engine(tiny_tokenizer(Path(directory)))
    config = ServerConfig(port=0, shutdown_timeout_s=30)
    report = serve(engine, model_info(), config, on_ready=lambda address: print(address, flush=True))
    print(report.ended_by, report.aborted_requests, engine.state, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_cleanly(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={"PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}", "PATH": ""},
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        answer = httpx.post(f"{address}/v1/completions", json={"prompt": "x"}, timeout=60)
        assert answer.status_code == 200
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (out.strip(), err, process.returncode) == (f"{number.name} 0 stopped", "", 0)
