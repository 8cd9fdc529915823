"""The HTTP application: which path does what. OpenAI-style, over any `Engine`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from perilune.http.access import Access
from perilune.http.errors import json_response
from perilune.serve.api.context import Context
from perilune.serve.api.envelope import on_error
from perilune.serve.api.generate import Generate
from perilune.serve.api.information import Information
from perilune.serve.api.limits import Limits
from perilune.serve.api.logs import RequestLog
from perilune.serve.api.openapi import document
from perilune.serve.api.responses import Responses
from perilune.serve.engine import Engine


def create_app(
    engine: Engine,
    *,
    limits: Limits | None = None,
    api_keys: tuple[str, ...] = (),
    hosts: frozenset[str] | None = None,
) -> Starlette:
    """The application; `app.state.context` is its `Context`.

    Args:
        engine: answers the requests; its loop lives as long as the application runs.
        limits: see `Limits`.
        api_keys: bearer keys; empty = everybody who reaches the port may ask.
        hosts: names in the Host header that are answered; None = all.
    """
    context = Context(engine, limits or Limits(), Access(api_keys, hosts))
    information, generate, responses = Information(context), Generate(context), Responses(context)
    openapi = document(engine.name, keys=bool(api_keys))

    def route(path: str, endpoint: Callable[[Request], Awaitable[Any]], method: str) -> Route:
        async def guarded(request: Request) -> Any:
            try:
                return await endpoint(request)
            except Exception as error:  # here, and not outside of the middleware, which names and logs the request
                return await on_error(request, error)

        return Route(path, guarded, methods=[method])

    async def describe(request: Request) -> Response:
        context.access.check_site(request)
        return json_response(openapi)

    routes = [
        route("/", information.page, "GET"),
        route("/health", information.health, "GET"),
        route("/ready", information.ready, "GET"),
        route("/version", information.version, "GET"),
        route("/metrics", information.metrics, "GET"),
        route("/openapi.json", describe, "GET"),
        route("/tokenize", information.tokenize, "POST"),
        route("/tokenizer_info", information.tokenizer_info, "GET"),
        route("/detokenize", information.detokenize, "POST"),
        route("/v1/models", information.models, "GET"),
        route("/v1/models/{name:path}", information.model, "GET"),
        route("/v1/chat/completions", generate.chat, "POST"),
        route("/v1/completions", generate.complete, "POST"),
        route("/v1/responses", responses.create, "POST"),
    ]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await context.start()
        try:
            yield
        finally:
            await context.stop()

    app = Starlette(
        routes=routes,
        middleware=[Middleware(RequestLog, metrics=context.metrics, paths=frozenset(one.path for one in routes))],
        exception_handlers={HTTPException: on_error},  # no such path or method
        lifespan=lifespan,
    )
    app.state.context = context
    return app
