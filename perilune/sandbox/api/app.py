"""The HTTP application: which path leads to which endpoint of `service.py`.

GET  /health  /  (a page that lists them)   /v1/drivers  /v1/usage
GET POST /v1/sandboxes            list, create            GET DELETE /v1/sandboxes/NAME
POST …/exec                       a line of JSON, then input; the answer is one object, or events as they come
DELETE /v1/commands/ID            PUT /v1/commands/ID/window  (rows and columns of a terminal)
GET PUT …/files?path=             POST …/checkpoint  …/fork  …/pause  …/resume
GET …/folder?path=  …/ports       POST …/tunnel/PORT      both ways as bytes
GET /v1/snapshots                 GET DELETE /v1/snapshots/ID   GET …/record   GET /v1/blobs/HASH
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.errors import PeriluneError
from perilune.http.access import Access
from perilune.http.errors import APIError
from perilune.sandbox.api.envelope import on_error
from perilune.sandbox.api.permissions import Permissions, ServiceLimits
from perilune.sandbox.api.service import Service
from perilune.sandbox.pool import Pool

log = logging.getLogger(__name__)


class _RequestIds:
    """Gives every answer the id of its request: the client's own, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        name = (
            given
            if 0 < len(given) <= 100 and given.isascii() and given.decode().isprintable()
            else uuid.uuid4().hex.encode()
        )

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name)]
                log.debug("%s %s %s: %s", name.decode(), scope["method"], scope["path"], message["status"])
            await send(message)

        await self._app(scope, receive, with_id)


def create_app(
    pool: Pool,
    *,
    limits: ServiceLimits | None = None,
    permissions: Permissions | None = None,
    api_keys: tuple[str, ...] = (),
    hosts: frozenset[str] | None = None,
) -> ASGIApp:
    """The application.

    Args:
        pool: what it serves; whoever made it closes it.
        limits, permissions: see there.
        api_keys: bearer keys; empty = everybody who reaches the port may use it.
        hosts: names in the Host header that are answered; None = all.
    """
    service = Service(pool, limits or ServiceLimits(), permissions or Permissions(), Access(api_keys, hosts))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            service.close()

    one = "/v1/sandboxes/{name}"
    routes = [
        ("GET", "/", service.page), ("GET", "/health", service.health), ("GET", "/v1/drivers", service.drivers),
        ("GET", "/v1/usage", service.usage), ("GET", "/v1/sandboxes", service.list), ("POST", "/v1/sandboxes", service.create),
        ("GET", one, service.show), ("DELETE", one, service.destroy), ("POST", f"{one}/exec", service.exec),
        ("GET", f"{one}/files", service.read_file), ("PUT", f"{one}/files", service.write_file),
        ("GET", f"{one}/folder", service.folder), ("GET", f"{one}/ports", service.ports),
        ("POST", f"{one}/tunnel/{{port:int}}", service.tunnel), ("POST", f"{one}/checkpoint", service.checkpoint),
        ("POST", f"{one}/fork", service.fork), ("POST", f"{one}/pause", service.pause), ("POST", f"{one}/resume", service.resume),
        ("DELETE", "/v1/commands/{id}", service.kill), ("PUT", "/v1/commands/{id}/window", service.window),
        ("GET", "/v1/snapshots", service.snapshots),
        ("GET", "/v1/snapshots/{id}", service.snapshot), ("DELETE", "/v1/snapshots/{id}", service.delete_snapshot),
        ("GET", "/v1/snapshots/{id}/record", service.record), ("GET", "/v1/blobs/{hash}", service.blob),
    ]  # fmt: skip
    expected = (HTTPException, ClientDisconnect, APIError, PeriluneError, Exception)
    app = Starlette(
        routes=[Route(path, handler, methods=[method]) for method, path, handler in routes],
        exception_handlers=dict.fromkeys(expected, on_error),
        lifespan=lifespan,
    )
    return _RequestIds(app)
