"""What an endpoint gives back. Plain data; it does not know how it is sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JsonReply:
    payload: object
    status: int = 200


@dataclass(frozen=True, slots=True)
class TextReply:
    content: bytes
    content_type: str
    status: int = 200


@dataclass(frozen=True, slots=True)
class EventReply:
    """Server-sent events, one or more in each piece. Whoever sends it calls `close` at the end, come what may."""

    events: AsyncIterator[bytes]
    close: Callable[[], None]


Reply = JsonReply | TextReply | EventReply
