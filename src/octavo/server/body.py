"""A request's body as plain data, within bounds of size and depth. It does not know any field."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.types import Receive, Scope

from octavo.server.api_error import ApiError, invalid
from octavo.server.config import ServerConfig


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads an answer."""


async def read_body(scope: Scope, receive: Receive, config: ServerConfig) -> bytes:
    """The whole body.

    Raises ApiError 413 beyond `max_body_bytes` (before reading it, where its length was announced), 408 where it has
    not come within `body_timeout_s`, and ClientGoneError.
    """
    try:
        async with asyncio.timeout(config.body_timeout_s):
            return await _read(scope, receive, config.max_body_bytes)
    except TimeoutError as error:
        message = f"the body did not come within {config.body_timeout_s:g} s; send it faster, or a shorter one"
        raise ApiError(408, message, code="body_timeout", headers=(("connection", "close"),)) from error


async def _read(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
            raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def parse_object(body: bytes, max_depth: int) -> dict[str, object]:
    """The body as a JSON object. Raises ApiError 400 when it is not one, or nested deeper than `max_depth`."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise invalid(f"the body is not valid JSON: {error}", None, "invalid_json") from error
    except RecursionError as error:
        raise _too_deep(max_depth) from error
    if not isinstance(value, dict):
        raise invalid(f"the body is a JSON {_json_kind(value)}; it must be an object of fields", None, "invalid_json")
    _check_depth(value, max_depth)
    return value


def _check_depth(value: object, max_depth: int) -> None:
    level: list[object] = [value]
    for _ in range(max_depth):
        below: list[object] = []
        for container in level:
            children = container.values() if isinstance(container, dict) else container
            below.extend(child for child in children if isinstance(child, (dict, list)))  # type: ignore[attr-defined]
        if not below:
            return
        level = below
    raise _too_deep(max_depth)


def _json_kind(value: object) -> str:
    kinds = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return kinds.get(type(value), "null")


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes} bytes, the most that this server reads; send a shorter one"
    return ApiError(413, message, code="body_too_large")


def _too_deep(max_depth: int) -> ApiError:
    return invalid(
        f"the body is nested deeper than {max_depth} levels, the most that this server reads", None, "invalid_json"
    )
