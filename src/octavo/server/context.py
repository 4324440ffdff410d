"""What every endpoint works with. Made once, read by all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.engine.async_engine import AsyncEngine
from octavo.server.config import ServerConfig
from octavo.server.fields import model_not_found
from octavo.server.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class ServerContext:
    """`wall_clock` gives seconds since 1970, `new_id` a fresh word for an answer's id."""

    engine: AsyncEngine
    model: ServedModel
    config: ServerConfig
    wall_clock: Callable[[], float]
    new_id: Callable[[], str]

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError 404 when this server does not serve it."""
        if name is None:
            return self.model.name
        if name not in self.model.names:
            raise model_not_found(name, self.model.names)
        return name


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, read and authorised. `body` is empty for a GET."""

    body: dict[str, object]
    tenant: str
    request_id: str
    path: dict[str, str]
