"""Puts a reply on the wire. It does not know what is in it."""

from __future__ import annotations

from starlette.types import Send

from octavo.server.answer import encode_json
from octavo.server.api_error import ApiError
from octavo.server.reply import JsonReply, TextReply


async def send_reply(send: Send, reply: JsonReply | TextReply, headers: tuple[tuple[str, str], ...] = ()) -> None:
    if isinstance(reply, JsonReply):
        content, content_type = encode_json(reply.payload), "application/json"
    else:
        content, content_type = reply.content, reply.content_type
    all_headers = (("content-type", content_type), ("content-length", str(len(content))), *headers)
    encoded = [(name.encode(), value.encode()) for name, value in all_headers]
    await send({"type": "http.response.start", "status": reply.status, "headers": encoded})
    await send({"type": "http.response.body", "body": content})


async def send_error(send: Send, error: ApiError) -> None:
    await send_reply(send, JsonReply(error.body(), error.status), error.headers)
