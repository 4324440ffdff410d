"""Errors as OpenAI's clients read them. It does not know what went wrong, only how to say it."""

from __future__ import annotations

from octavo.errors import (
    CapacityError,
    EngineOverloadedError,
    EngineStoppedError,
    InvalidRequestError,
    OctavoError,
)


class ApiError(Exception):
    """An answer other than 200: status, and the fields of the body's `error`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, kind="service_unavailable", code="engine_stopped", headers=(("retry-after", "5"),))


def to_api_error(error: Exception) -> ApiError:
    """Any exception as an answer: octavo's own by their kind, others as a 500 that does not show the inside."""
    match error:
        case ApiError():
            return error
        case CapacityError(param="n" | "best_of"):
            return invalid(str(error), error.param)
        case CapacityError():
            return ApiError(400, str(error), param=error.param, code="context_length_exceeded")
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.param, code="invalid_value")
        case EngineOverloadedError():
            return ApiError(429, str(error), kind="overloaded", code="queue_full", headers=(("retry-after", "1"),))
        case EngineStoppedError():
            return unavailable(str(error))
        case OctavoError():
            return ApiError(500, str(error), kind="server_error", code="internal_error")
        case _:
            return ApiError(
                500, "the server failed on this request; its log says why", kind="server_error", code="internal_error"
            )
