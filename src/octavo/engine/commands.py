"""What may be asked of the engine's thread. Plain data; a reply is a future of the event loop that asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.cache_curve import CacheCurve
from octavo.core.sharing import BranchMemory
from octavo.engine.inbox import Inbox
from octavo.engine.open_request import OpenRequest
from octavo.engine.status import EngineStatus

MemoryListener = Callable[[tuple[BranchMemory, ...]], None]


@dataclass(frozen=True, slots=True)
class Submit:
    opened: OpenRequest
    inbox: Inbox
    index: int
    reply: asyncio.Future[None]
    on_memory: MemoryListener | None = None  # called on the inbox's event loop, after each step


@dataclass(frozen=True, slots=True)
class Abort:
    """End these requests; `reply`, where given, gets how many were still open. With `inbox` only those read there."""

    request_ids: tuple[str, ...]
    reason: str
    reply: asyncio.Future[int] | None = None
    inbox: Inbox | None = None


@dataclass(frozen=True, slots=True)
class AbortAll:
    reason: str
    reply: asyncio.Future[int]


@dataclass(frozen=True, slots=True)
class GetStatus:
    reply: asyncio.Future[EngineStatus]


@dataclass(frozen=True, slots=True)
class GetBranchMemory:
    """Of one request with several branches, or (None) of all."""

    request_id: str | None
    reply: asyncio.Future[tuple[BranchMemory, ...]]


@dataclass(frozen=True, slots=True)
class GetCurve:
    """What caches of other sizes would hit; None where nobody estimates it."""

    reply: asyncio.Future[CacheCurve | None]


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    reply: asyncio.Future[int]


@dataclass(frozen=True, slots=True)
class Drain:
    """Answered once no request is open."""

    reply: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class Stop:
    reason: str


Command = Submit | Abort | AbortAll | GetStatus | GetBranchMemory | GetCurve | ResetPrefixCache | Drain | Stop
