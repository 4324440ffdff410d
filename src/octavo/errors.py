"""One tree of exceptions. A message names the value, the range that is allowed and the cure."""

from __future__ import annotations


class OctavoError(Exception):
    """Base of everything that octavo raises on purpose."""


class ConfigError(OctavoError):
    """A flag or a config field that cannot be had."""


class ModelError(OctavoError):
    """A model file that is broken, incomplete, of an unknown architecture or not to be found."""


class DownloadError(ModelError):
    """A model that could not be fetched; nothing half-downloaded is ever used."""


class MemoryBudgetError(ConfigError):
    """The memory asked for is not there, or too small for one request."""


class KernelError(OctavoError):
    """The native kernels are missing or do not fit this machine."""


class EngineStoppedError(OctavoError):
    """The engine no longer takes requests."""


class EngineOverloadedError(OctavoError):
    """The queue is full: the same request may be sent again later."""


class InvalidRequestError(OctavoError):
    """A request that is wrong in itself: HTTP 400.

    `param` is the field's name as the client wrote it, or None.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CapacityError(InvalidRequestError):
    """A request that can never fit the context or the pool; the message shows the arithmetic."""
