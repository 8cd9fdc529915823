"""One error envelope for every path: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from perilune.errors import CapacityError, PeriluneError, RequestError
from perilune.serve.engine import EngineClosed
from perilune.serve.request import FieldError

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "client_closed_request",
}


class APIError(Exception):
    """An answer other than 200, raised inside a route."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers


def unavailable(message: str, code: str, *, seconds: float = 5.0) -> APIError:
    """503: the client should come back, here or at another server."""
    return APIError(503, message, code=code, headers={"Retry-After": str(max(1, round(seconds)))})


def as_api_error(error: BaseException) -> APIError:
    """What the client is told about an exception; details of an unexpected one stay in the log."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, FieldError):
        return APIError(400, str(error), param=error.param or None, code=error.code)
    if isinstance(error, RequestError):
        return APIError(400, str(error))
    if isinstance(error, CapacityError):
        seconds = getattr(error, "retry_after", None) or 1.0
        return APIError(429, str(error), code="queue_full", headers={"Retry-After": str(max(1, round(seconds)))})
    if isinstance(error, HTTPException):
        detail = {404: "there is nothing at this path", 405: "this path does not take this method"}
        return APIError(
            error.status_code, detail.get(error.status_code, error.detail), headers=dict(error.headers or {})
        )
    if isinstance(error, ClientDisconnect):
        return APIError(499, "the client has closed the connection")
    if isinstance(error, EngineClosed):
        return unavailable(str(error), "engine_stopped")
    if getattr(error, "temporary", False):  # the engine has failed and starts again
        return unavailable(str(error), "engine_failed")
    if isinstance(error, PeriluneError):
        return APIError(500, str(error))
    return APIError(500, "internal error; the server's log has the details")


def error_body(error: APIError) -> dict[str, Any]:
    """The envelope."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def on_error(request: Request, error: Exception) -> Response:
    """Exception handler of the application."""
    api_error = as_api_error(error)
    if api_error.status == 500:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return json_response(error_body(api_error), api_error.status, api_error.headers)
