"""The HTTP application: which path is which endpoint. It takes an engine and builds none."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from octavo.engine.async_engine import AsyncEngine
from octavo.server import generate, inspect, metrics
from octavo.server.api_error import ApiError
from octavo.server.config import ServerConfig
from octavo.server.context import ServerContext
from octavo.server.endpoint import Endpoint, Handler
from octavo.server.gate import Gate
from octavo.server.served_model import ServedModel

_ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", generate.chat_completions),
    ("POST", "/v1/completions", generate.completions),
    ("GET", "/v1/models", inspect.list_models),
    ("GET", "/v1/models/{model:path}", inspect.get_model),
    ("GET", "/health", inspect.health),
    ("GET", "/version", inspect.version),
    ("GET", "/metrics", metrics.metrics),
    ("GET", "/v1/kv/status", inspect.kv_status),
    ("GET", "/v1/kv/mrc", inspect.kv_mrc),
    ("POST", "/v1/kv/reset", inspect.kv_reset),
    ("POST", "/tokenize", inspect.tokenize),
    ("POST", "/detokenize", inspect.detokenize),
)


def create_app(
    engine: AsyncEngine,
    info: ServedModel,
    config: ServerConfig,
    *,
    wall_clock: Callable[[], float] = time.time,
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
) -> Starlette:
    """An ASGI application. Its lifespan starts the engine and, at the end, shuts it down."""
    context = ServerContext(engine, info, config, wall_clock, new_id)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.shutdown(config.shutdown_timeout_s)

    return Starlette(
        routes=[Route(path, Endpoint(context, handler), methods=[method]) for method, path, handler in _ROUTES],
        middleware=[Middleware(Gate, context=context)],
        exception_handlers={HTTPException: _no_such_endpoint},
        lifespan=lifespan,
    )


async def _no_such_endpoint(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the API's own shape."""
    assert isinstance(error, HTTPException)
    at = f"{request.method} {request.url.path[:200]}"
    paths = ", ".join(f"{method} {path}" for method, path, _ in _ROUTES)
    answer = ApiError(error.status_code, f"there is no endpoint {at}; there are {paths}", code="unknown_endpoint")
    return JSONResponse(answer.body(), status_code=error.status_code, headers=error.headers)
