"""One error envelope for every path: `{"error": {"message", "type", "param", "code"}}`, with a request id in the headers."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from perilune.errors import CapacityError, ConfigError, PeriluneError, RequestError, SandboxError
from perilune.sandbox import protocol
from perilune.sandbox.wire_errors import field_of, name_of

_STATUS: tuple[tuple[type[PeriluneError], int], ...] = (
    (protocol.NoSuchSandbox, 404), (protocol.GuestLost, 410), (protocol.GuestFileError, 422), (protocol.StoreFull, 507),
    (protocol.StoreDamaged, 500), (protocol.DriverUnavailable, 503), (SandboxError, 409), (CapacityError, 429),
    (ConfigError, 400), (RequestError, 400), (PeriluneError, 500),
)  # fmt: skip


class APIError(Exception):
    """An answer other than 200, raised inside a route."""

    def __init__(
        self, status: int, message: str, *, kind: str = "RequestError", param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = headers


def as_api_error(error: BaseException) -> APIError:
    """What the client is told about an exception; details of an unexpected one stay in the log."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, PeriluneError):
        status = next(status for kind, status in _STATUS if isinstance(error, kind))
        headers = {"Retry-After": "1"} if status == 429 else None
        return APIError(status, str(error), kind=name_of(error), param=field_of(error), headers=headers)
    if isinstance(error, HTTPException):
        detail = {404: "there is nothing at this path", 405: "this path does not take this method"}
        text = detail.get(error.status_code, error.detail)
        return APIError(error.status_code, text, headers=dict(error.headers or {}))
    if isinstance(error, ClientDisconnect):
        return APIError(499, "the client has closed the connection")
    return APIError(500, "internal error; the server's log has the details", kind="PeriluneError")


def error_body(error: APIError) -> dict[str, Any]:
    """The envelope."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def on_error(request: Request, error: Exception) -> Response:
    """Exception handler of the application."""
    api_error = as_api_error(error)
    return json_response(error_body(api_error), api_error.status, api_error.headers)
