"""What clients of the service are told about an error: enough to raise the same one again."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from perilune.errors import CapacityError, ConfigError, PeriluneError, RequestError, SandboxError
from perilune.http.errors import APIError, error_body, from_framework, json_response
from perilune.sandbox import protocol
from perilune.sandbox.wire_errors import field_of, name_of

_STATUS: tuple[tuple[type[PeriluneError], int], ...] = (
    (protocol.NoSuchSandbox, 404), (protocol.GuestLost, 410), (protocol.GuestFileError, 422), (protocol.StoreFull, 507),
    (protocol.StoreDamaged, 500), (protocol.DriverUnavailable, 503), (SandboxError, 409), (CapacityError, 429),
    (ConfigError, 400), (RequestError, 400), (PeriluneError, 500),
)  # fmt: skip


def as_api_error(error: BaseException) -> APIError:
    """What the client is told about an exception; details of an unexpected one stay in the log."""
    if (known := from_framework(error)) is not None:
        return known
    if isinstance(error, PeriluneError):
        status = next(status for kind, status in _STATUS if isinstance(error, kind))
        headers = {"Retry-After": "1"} if status == 429 else None
        return APIError(status, str(error), kind=name_of(error), param=field_of(error), headers=headers)
    return APIError(500, "internal error; the server's log has the details", kind="PeriluneError")


def body_of(error: APIError) -> dict[str, Any]:
    """The envelope; its type is the name of the exception that the client is to raise."""
    return error_body(error, "RequestError")


async def on_error(request: Request, error: Exception) -> Response:
    """Exception handler of the application."""
    api_error = as_api_error(error)
    return json_response(body_of(api_error), api_error.status, api_error.headers)
