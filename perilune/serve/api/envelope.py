"""What clients of the API are told about an error, on every path and in every stream."""

from __future__ import annotations

import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from perilune.errors import CapacityError, PeriluneError, RequestError
from perilune.http.errors import APIError, error_body, from_framework, json_response
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


def unavailable(message: str, code: str, *, seconds: float = 5.0) -> APIError:
    """503: the client should come back, here or at another server."""
    return APIError(503, message, code=code, headers={"Retry-After": str(max(1, round(seconds)))})


def as_api_error(error: BaseException) -> APIError:
    """What the client is told about an exception; details of an unexpected one stay in the log."""
    if (known := from_framework(error)) is not None:
        return known
    if isinstance(error, FieldError):
        return APIError(400, str(error), param=error.param or None, code=error.code)
    if isinstance(error, RequestError):
        return APIError(400, str(error))
    if isinstance(error, CapacityError):
        seconds = getattr(error, "retry_after", None) or 1.0
        return APIError(429, str(error), code="queue_full", headers={"Retry-After": str(max(1, round(seconds)))})
    if isinstance(error, EngineClosed):
        return unavailable(str(error), "engine_stopped")
    if getattr(error, "temporary", False):  # the engine has failed and starts again
        return unavailable(str(error), "engine_failed")
    if isinstance(error, PeriluneError):
        return APIError(500, str(error))
    return APIError(500, "internal error; the server's log has the details")


def body_of(error: APIError) -> dict[str, Any]:
    """The envelope, with the types of the OpenAI API."""
    return error_body(
        error, _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    )


async def on_error(request: Request, error: Exception) -> Response:
    """Exception handler of the application."""
    api_error = as_api_error(error)
    if api_error.status == 500:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return json_response(body_of(api_error), api_error.status, api_error.headers)
