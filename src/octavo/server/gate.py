"""What every HTTP request passes first: a request id for both sides' logs, and the API key.

It does not know any endpoint but the one that is open to all.
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.api_error import ApiError
from octavo.server.context import ServerContext
from octavo.server.send import send_error
from octavo.server.tenant import ApiKeys

REQUEST_ID = "octavo.request_id"
TENANT = "octavo.tenant"
OPEN_PATHS = frozenset({"/health"})

_GOOD_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class Gate:
    """ASGI middleware. Puts REQUEST_ID and TENANT into the scope and X-Request-Id on every answer."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._new_id = context.new_id
        self._keys = ApiKeys(context.config.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _GOOD_ID.fullmatch(given) else f"req-{self._new_id()}".encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id)]}
            await send(message)

        scope[REQUEST_ID] = request_id.decode()
        tenant = self._keys.tenant_of(headers.get(b"authorization", b"").decode("latin-1"))
        if tenant is None and scope["path"] not in OPEN_PATHS:
            await send_error(send_with_id, _unauthorized())
            return
        scope[TENANT] = tenant or ""
        await self._app(scope, receive, send_with_id)


def _unauthorized() -> ApiError:
    return ApiError(
        401,
        "this server asks for an API key: send the header `Authorization: Bearer KEY` with one of its keys",
        kind="authentication_error",
        code="invalid_api_key",
        headers=(("www-authenticate", "Bearer"),),
    )
