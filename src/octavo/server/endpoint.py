"""One endpoint as an ASGI application: reads the body, runs a handler, sends its reply, or the error as the API says.

This is the request handler's border: whatever a handler raises ends here, in exactly one answer. A client that goes
away cancels the handler. It does not know what any handler does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from octavo.server.answer import encode_json, event
from octavo.server.api_error import ApiError, to_api_error
from octavo.server.body import ClientGoneError, parse_object, read_body
from octavo.server.context import Call, ServerContext
from octavo.server.gate import REQUEST_ID, TENANT
from octavo.server.reply import EventReply, Reply
from octavo.server.send import send_error, send_reply

log = logging.getLogger("octavo.server")

Handler = Callable[[ServerContext, Call], Awaitable[Reply]]

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Endpoint:
    def __init__(self, context: ServerContext, handler: Handler) -> None:
        self._context = context
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        config = self._context.config
        try:
            body = await read_body(scope, receive, config)
        except ClientGoneError:
            return
        except ApiError as error:
            await send_error(send, error)
            return
        answering = asyncio.ensure_future(self._answer(scope, body, send))
        leaving = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()  # the client is gone, or the server must end now
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        begun = False
        try:
            reads_body = scope["method"] == "POST"
            call = Call(
                body=parse_object(body or b"{}", self._context.config.max_json_depth) if reads_body else {},
                tenant=scope[TENANT],
                request_id=scope[REQUEST_ID],
                path=scope.get("path_params", {}),
            )
            reply = await self._handler(self._context, call)
            if isinstance(reply, EventReply):
                try:
                    async for events in reply.events:
                        if not begun:
                            begun = True
                            await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
                        await send({"type": "http.response.body", "body": events, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})
                finally:
                    reply.close()
            else:
                await send_reply(send, reply)
        except Exception as error:  # the request handler's border
            known = to_api_error(error)
            if known.status == 500:
                trace = None if known is error else error  # what was raised as an answer needs no trace
                log.error("request %s failed: %s", scope[REQUEST_ID], error, exc_info=trace)
            if begun:
                await send({"type": "http.response.body", "body": event(encode_json(known.body())), "more_body": False})
            else:
                await send_error(send, known)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
