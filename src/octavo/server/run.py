"""Runs the application on a socket until it is told to stop. It does not know the model, nor what the CLI prints."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from octavo.engine.async_engine import AsyncEngine
from octavo.errors import ConfigError, EngineStoppedError
from octavo.server.app import create_app
from octavo.server.config import ServerConfig
from octavo.server.served_model import ServedModel

log = logging.getLogger("octavo.server")

_BACKLOG = 2048
_CLOSING_S = 5  # for connections to close after the engine has answered every request


@dataclass(frozen=True, slots=True)
class ServeReport:
    """How serving ended: what asked for it, and how many requests were aborted because they did not end in time."""

    ended_by: str
    aborted_requests: int


def bind_socket(host: str, port: int) -> socket.socket:
    """A bound socket, not listening yet: bind before the model is loaded, and a taken port is known at once.

    Port 0 means any free one. Raises ConfigError naming host, port and the cure.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"host {host!r} cannot be found ({error}); pass --host 127.0.0.1 or an address of this machine"
        ) from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _bind_error(host, port, error) from error
    return bound


def serve(
    engine: AsyncEngine,
    info: ServedModel,
    config: ServerConfig,
    *,
    bound: socket.socket | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> ServeReport:
    """Serves until SIGTERM or SIGINT, then lets running requests end within `config.shutdown_timeout_s`.

    `on_ready` is called with the address (http://host:port) once requests are taken. A second signal ends what still
    runs at once. Every open request gets its one final answer, and those that were aborted say why.
    """
    server = HttpServer(engine, info, config, bound)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(server.run(on_ready))


class HttpServer:
    """One run of the application on one socket. `stop` may be called from the event loop's thread only."""

    def __init__(
        self, engine: AsyncEngine, info: ServedModel, config: ServerConfig, bound: socket.socket | None = None
    ) -> None:
        self._engine = engine
        self._config = config
        self._bound = bind_socket(config.host, config.port) if bound is None else bound
        self._on_ready: Callable[[str], None] | None = None
        self._listening = False
        self._ended_by = ""
        self._draining: asyncio.Task[int] | None = None
        self._hurrying: asyncio.Task[int] | None = None
        self._server = uvicorn.Server(
            uvicorn.Config(
                create_app(engine, info, config),
                http="httptools",
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="warning",
                access_log=config.access_log,
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=math.ceil(config.shutdown_timeout_s) + _CLOSING_S,
                callback_notify=self._tick,
            )
        )

    @property
    def address(self) -> str:
        host, port = self._bound.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def run(self, on_ready: Callable[[str], None] | None = None) -> ServeReport:
        self._on_ready = on_ready
        address = self.address
        try:
            await self._server.serve(sockets=[self._bound])
        except OSError as error:
            raise _bind_error(self._config.host, self._config.port, error) from error
        finally:
            self._bound.close()
        aborted = await self._draining if self._draining is not None else 0
        hurried = await self._hurrying if self._hurrying is not None else 0
        if aborted + hurried:
            log.warning(
                "%s: stopped; %d requests were aborted because they did not end in time", address, aborted + hurried
            )
        return ServeReport(self._ended_by or "the server itself", aborted + hurried)

    def stop(self, asked_by: str) -> None:
        """Once: take no more requests and let the running ones end in time. Again: end them now."""
        if self._draining is None:
            self._ended_by = asked_by
            reason = f"the server is shutting down ({asked_by})"
            log.info("%s: finishing running requests, for at most %g s", asked_by, self._config.shutdown_timeout_s)
            self._draining = asyncio.ensure_future(self._engine.shutdown(self._config.shutdown_timeout_s, reason))
            self._server.should_exit = True
        elif self._hurrying is None:
            self._hurrying = asyncio.ensure_future(self._abort_all(f"aborted: {asked_by} came again"))

    async def _abort_all(self, reason: str) -> int:
        try:
            return await self._engine.abort_all(reason)
        except EngineStoppedError:
            return 0

    async def _tick(self) -> None:
        """Called by uvicorn when it has begun to listen, and now and then later."""
        if self._listening:
            return
        self._listening = True
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop, number.name)
        if self._on_ready is not None:
            self._on_ready(self.address)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _bind_error(host: str, port: int, error: OSError) -> ConfigError:
    match error.errno:
        case errno.EADDRINUSE:
            return ConfigError(
                f"port {port} on {host} is taken by another program; stop it, or pass another --port (0: any free one)"
            )
        case errno.EACCES:
            return ConfigError(
                f"port {port} on {host} needs more rights than this process has; pass a --port of 1024 or more"
            )
        case errno.EADDRNOTAVAIL:
            return ConfigError(
                f"{host} is no address of this machine; pass --host 127.0.0.1, or 0.0.0.0 for all of its addresses"
            )
        case _:
            return ConfigError(f"cannot listen on {host}:{port}: {error}; pass another --host or --port")
