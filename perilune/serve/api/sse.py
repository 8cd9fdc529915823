"""Server-sent events: text while it is drawn, heartbeats while it is not, and a stop when the reader has gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from perilune.serve.api.envelope import as_api_error, body_of

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": waiting\n\n"


def event(value: Any, name: str = "") -> bytes:
    """One event with a JSON object, with a type if `name` is given."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(value) + b"\n\n"


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(work: Awaitable[Any], receive: Receive) -> Any:
    """Await `work`, cancelling it if the client goes away first; returns None then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for pending in (task, gone):
            if not pending.done():
                pending.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await pending


class EventStream:
    """An ASGI response that sends what `events` yields.

    Args:
        events: encoded events; it is closed early if the client goes away. An error after the first byte is sent as
            an event with the error envelope.
        on_close: called in any case at the end.
        write_seconds: a client that takes longer to read what was sent has gone.
    """

    status_code = 200

    def __init__(self, events: AsyncIterator[bytes], on_close: Callable[[], None], write_seconds: float) -> None:
        self._events = events
        self._on_close = on_close
        self._write_seconds = write_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await unless_disconnected(self._send(send), receive)
        finally:
            self._on_close()

    async def _send(self, send: Send) -> None:
        async def body(chunk: bytes, more: bool = True) -> None:
            async with asyncio.timeout(self._write_seconds):
                await send({"type": "http.response.body", "body": chunk, "more_body": more})

        try:
            async for chunk in self._events:
                try:
                    await body(chunk)
                except TimeoutError:
                    log.warning("a client read nothing for %g s; its stream is closed", self._write_seconds)
                    return
        except Exception as error:
            api_error = as_api_error(error)
            log.log(logging.ERROR if api_error.status == 500 else logging.INFO, "stream ended by an error",
                    exc_info=error if api_error.status == 500 else None)  # fmt: skip
            await body(event(body_of(api_error)))
        await body(b"", more=False)
