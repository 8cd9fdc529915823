"""What an operator may do, on a port of its own: stop and go on, abort, look into the cache, change weights.

The port listens on the loopback address only, and takes keys of its own. What an engine does not offer is answered with
400 and a line that says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, is_dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from perilune.errors import PeriluneError
from perilune.http.access import Access
from perilune.http.errors import APIError, json_response
from perilune.http.exposure import LOOPBACK
from perilune.serve.api.chat_protocol import ChatRequest, Message
from perilune.serve.api.context import Context
from perilune.serve.api.envelope import on_error, unavailable
from perilune.serve.api.protocol import decode
from perilune.serve.request import FieldError


class Nothing(msgspec.Struct):
    """No fields."""


class Abort(msgspec.Struct, kw_only=True):
    """Which requests: one by its id, or all."""

    request_id: str | None = None
    all: bool = False


class Weights(msgspec.Struct):
    """Where the new weights are, and what they are called."""

    path: str
    version: str


class Prefix(msgspec.Struct, kw_only=True):
    """Beginning of a prompt, in one of three forms."""

    prompt: str | None = None
    ids: list[int] | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    cache_salt: str = ""
    seconds: float = 600.0


class Pin(msgspec.Struct):
    """A pin, by the name that it was given."""

    name: str


class Admin:
    """The endpoints.

    Args:
        context: of the server that is looked after.
        access: who may.
    """

    def __init__(self, context: Context, access: Access) -> None:
        self._context = context
        self._access = access

    def routes(self) -> list[Route]:
        """All of them."""
        posts: dict[str, tuple[type, Callable[[Any], Awaitable[Any]]]] = {
            "/admin/pause": (Nothing, self.pause),
            "/admin/resume": (Nothing, self.resume),
            "/admin/abort": (Abort, self.abort),
            "/admin/reset_prefix_cache": (Nothing, self.reset_prefix_cache),
            "/admin/update_weights": (Weights, self.update_weights),
            "/admin/cache/pin": (Prefix, self.pin),
            "/admin/cache/unpin": (Pin, self.unpin),
            "/admin/cache/explain": (Prefix, self.explain),
        }
        gets: dict[str, Callable[[], Awaitable[Any]]] = {
            "/admin/requests": self.requests,
            "/admin/invariants": self.invariants,
            "/admin/cache/pages": self.pages,
            "/admin/cache/timeline": self.timeline,
            "/admin/engine": self.engine,
        }
        routes = [Route(path, self._post(*what), methods=["POST"]) for path, what in posts.items()]
        return routes + [Route(path, self._get(what), methods=["GET"]) for path, what in gets.items()]

    def _post(self, kind: type, work: Callable[[Any], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                self._access.check(request)
                body = await self._context.body(request)
                return json_response(_plain(await work(decode(body or b"{}", kind))))
            except Exception as error:
                return await on_error(request, error)

        return endpoint

    def _get(self, work: Callable[[], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                self._access.check(request)
                return json_response(_plain(await work()))
            except Exception as error:
                return await on_error(request, error)

        return endpoint

    async def _engine(self, name: str, *arguments: Any) -> Any:
        """Call the engine's administration beside the event loop: it waits for the step that runs."""
        work = getattr(getattr(self._context.engine, "admin", None), name, None)
        if work is None:
            raise APIError(400, f"this engine has no {name}", code="unsupported_operation")
        try:
            return await asyncio.to_thread(work, *arguments)
        except PeriluneError as error:
            raise APIError(400, str(error)) from None

    async def pause(self, asked: Nothing) -> dict[str, Any]:
        """Run no further step; requests wait."""
        await self._engine("pause")
        return {"paused": True}

    async def resume(self, asked: Nothing) -> dict[str, Any]:
        """Go on."""
        await self._engine("resume")
        return {"paused": False}

    async def abort(self, asked: Abort) -> dict[str, Any]:
        """End requests; their clients get 503."""
        if asked.all == (asked.request_id is not None):
            raise FieldError('give either "request_id" or "all": true', "request_id")
        error = unavailable("the operator has ended this request", "aborted")
        return {"aborted": self._context.exchanges.abort(asked.request_id, error)}

    async def requests(self) -> dict[str, Any]:
        """Those that are being answered."""
        return {"requests": self._context.exchanges.listed(), "draining": self._context.exchanges.draining}

    async def reset_prefix_cache(self, asked: Nothing) -> dict[str, Any]:
        """Forget what was computed; running requests keep theirs."""
        return {"freed_pages": await self._engine("reset_prefix_cache")}

    async def update_weights(self, asked: Weights) -> dict[str, Any]:
        """Load other weights; the cache of the old ones is not used any more."""
        await self._engine("update_weights", asked.path, asked.version)
        return {"weight_version": asked.version}

    async def invariants(self) -> dict[str, Any]:
        """What is wrong with the cache's bookkeeping: nothing."""
        violations = list(await self._engine("check_invariants") or ())
        return {"ok": not violations, "violations": violations}

    async def pin(self, asked: Prefix) -> Any:
        """Keep a prefix, cached or not yet, for some time."""
        if not 0 < asked.seconds <= 86_400:
            raise FieldError(f"seconds={asked.seconds:g} must be a number in (0, 86400]", "seconds")
        return await self._engine("pin", await self._ids(asked), asked.seconds, asked.cache_salt)

    async def unpin(self, asked: Pin) -> Any:
        """Keep it no longer."""
        await self._engine("unpin", asked.name)
        return {"unpinned": asked.name}

    async def explain(self, asked: Prefix) -> Any:
        """Why a prompt hits the cache or misses it."""
        return await self._engine("explain", await self._ids(asked), asked.cache_salt)

    async def pages(self) -> Any:
        """What every page holds."""
        return {"pages": await self._engine("page_map")}

    async def timeline(self) -> Any:
        """Hits and misses of the last requests."""
        return {"events": [_plain(event) for event in await self._engine("cache_events")]}

    async def engine(self) -> Any:
        """The engine's counters."""
        return await asyncio.to_thread(self._context.engine.metrics)

    async def _ids(self, asked: Prefix) -> list[int]:
        given = [value for value in (asked.prompt, asked.ids, asked.messages) if value is not None]
        if len(given) != 1:
            raise FieldError("give one of prompt, ids and messages", "prompt")
        if asked.ids is not None:
            return asked.ids
        context = self._context
        if asked.prompt is not None:
            text = asked.prompt
            return await context.prepare(lambda: context.words.tokenizer.encode(text))
        chat = ChatRequest(messages=asked.messages or [], tools=asked.tools)
        messages, options = chat.conversation(), chat.options()
        return await context.prepare(lambda: context.engine.prompt_ids(messages, options))


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def create_admin_app(context: Context, keys: tuple[str, ...]) -> Starlette:
    """The application of the admin port.

    Args:
        context: of the server that is looked after.
        keys: bearer keys; empty = everybody on this machine may.
    """
    admin = Admin(context, Access(keys, LOOPBACK))
    return Starlette(routes=admin.routes(), exception_handlers={HTTPException: on_error})
