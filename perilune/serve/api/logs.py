"""One line a request, with a name by which the client, the log and the operator mean the same one."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.serve.api.metrics import Metrics

log = logging.getLogger("perilune.serve.requests")

_NAME = re.compile(r"[\x21-\x7e]{1,128}")
_QUIET = frozenset(("/health", "/ready", "/metrics"))
"""Asked every few seconds by machines: logged at DEBUG."""


def record(scope: Scope) -> dict[str, Any]:
    """What is to be logged about a request; parts of the application add to it."""
    return scope.setdefault("perilune.record", {})


def request_id(scope: Scope) -> str:
    """The request's name."""
    return record(scope)["request_id"]


class RequestLog:
    """Middleware: names the request (its `X-Request-Id`, or a new one), sends the name back, logs the end.

    Args:
        app: the application.
        metrics: counts responses.
        paths: paths that exist; all others are counted as one.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        name = given if _NAME.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        entry = record(scope)
        entry |= {"request_id": name, "method": scope["method"], "path": scope["path"], "status": 0}
        began = time.perf_counter()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry["status"] = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            entry["seconds"] = round(time.perf_counter() - began, 6)
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.response(path, entry["status"])
            quiet = scope["path"] in _QUIET and entry["status"] < 500
            log.log(logging.DEBUG if quiet else logging.INFO, "%s", _line(entry), extra={"fields": entry})


def _line(entry: dict[str, Any]) -> str:
    rest = {key: value for key, value in entry.items() if key not in ("method", "path", "status", "seconds")}
    head = f"{entry['method']} {entry['path']!r} {entry['status']} {entry['seconds']:.3f}s"
    return " ".join([head, *(f"{key}={value}" for key, value in rest.items())])


class JsonFormatter(logging.Formatter):
    """Log records as one JSON object a line: time (UTC), level, logger, message or the fields of a request."""

    converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        entry: dict[str, Any] = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        entry |= fields if isinstance(fields, dict) else {"message": record.getMessage()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)
