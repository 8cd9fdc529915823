"""Answers other than 200: one exception, and one form of the body: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response


class APIError(Exception):
    """An answer other than 200, raised inside a route.

    Args:
        status: of HTTP.
        message: for a person.
        kind: the body's `type`; None = the server derives it from the status.
        param: the field that is wrong.
        code: for a program.
        headers: of the answer.
    """

    def __init__(
        self, status: int, message: str, *, kind: str | None = None, param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = headers


def from_framework(error: BaseException) -> APIError | None:
    """What the client is told about an exception that is an answer already, or the web framework's; None for others."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):
        detail = {404: "there is nothing at this path", 405: "this path does not take this method"}
        text = detail.get(error.status_code, error.detail)
        return APIError(error.status_code, text, headers=dict(error.headers or {}))
    if isinstance(error, ClientDisconnect):
        return APIError(499, "the client has closed the connection")
    return None


def error_body(error: APIError, kind: str) -> dict[str, Any]:
    """The body; `kind` is its type if the error has none of its own."""
    return {"error": {"message": error.message, "type": error.kind or kind, "param": error.param, "code": error.code}}


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")
