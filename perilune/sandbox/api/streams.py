"""Answers that go both ways: a command with its input and output, a connection to a guest's port.

The request's body is read while the answer is written. A client that goes away ends what it had started.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from perilune.sandbox.api.envelope import as_api_error, body_of

log = logging.getLogger(__name__)
HEARTBEAT = b": waiting\n\n"
PIECE = 65536


def event(value: Any) -> bytes:
    """One server-sent event with a JSON object."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def output_event(stream: str, data: bytes) -> bytes:
    """A piece of output."""
    return event({"stream": stream, "data": base64.b64encode(data).decode()})


class Body:
    """A request's body, piece by piece; `rest` gets what was read too far."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ahead = b""
        self._ended = False

    async def line(self, longest: int) -> bytes:
        """Bytes up to a line feed or the end. Raises ValueError if there are more than `longest`."""
        data = b""
        while b"\n" not in data and not self._ended:
            data += await self._next()
            if len(data) > longest:
                raise ValueError(f"the first line has more than {longest} bytes")
        line, _, self._ahead = data.partition(b"\n")
        return line

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError
        self._ended = not message.get("more_body", False)
        return message.get("body", b"")

    async def pieces(self) -> AsyncIterator[bytes]:
        """The rest of it, to its end."""
        if self._ahead:
            yield self._ahead
            self._ahead = b""
        while not self._ended:
            if piece := await self._next():
                yield piece

    async def gone(self) -> None:
        """Return when the client has closed the connection; call it after the end of the body."""
        with contextlib.suppress(ConnectionResetError):
            while True:
                await self._next()


async def write_all(fd: int, data: bytes) -> bool:
    """Write to a pipe as it takes it; False when nobody reads it any more."""
    loop, view = asyncio.get_running_loop(), memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            ready = asyncio.Event()
            loop.add_writer(fd, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_writer(fd)
        except OSError:
            return False
    return True


async def feed(body: Body, fd: int) -> None:
    """Pass the body to a pipe and close it at the body's end; go on until the client is gone."""
    try:
        os.set_blocking(fd, False)
        reading = True
        async for piece in body.pieces():
            reading = reading and await write_all(fd, piece)
    except ConnectionResetError:
        return
    finally:
        os.close(fd)
    await body.gone()


class Answer:
    """An ASGI response that sends what `pieces` yields while `incoming` takes the request's body.

    Args:
        pieces: the answer's body; ended early when `incoming` returns first, which it does when the client is gone.
        incoming: takes the body, and returns only when the client has closed the connection.
        close: awaited in any case at the end.
        kind: content type; an error after the first byte is sent as an event where it is text/event-stream.
    """

    def __init__(
        self, pieces: AsyncIterator[bytes], incoming: Awaitable[None], close: Callable[[], Awaitable[None]], kind: str
    ) -> None:
        self._pieces, self._incoming, self._close, self._kind = pieces, incoming, close, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", self._kind.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        # What is left of the request's body would be taken for another request.
        headers.append((b"connection", b"close"))
        tasks = [asyncio.ensure_future(self._incoming)]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            tasks.append(asyncio.ensure_future(self._send(send)))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for done in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(done, Exception) and not isinstance(done, OSError):
                    log.warning("a sandbox stream ended by an error", exc_info=done)
            await asyncio.shield(self._close())

    async def _send(self, send: Send) -> None:
        async def body(chunk: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": chunk, "more_body": more})

        await body(b"")  # The head goes out now, not with the first output.
        try:
            async for piece in self._pieces:
                await body(piece)
        except Exception as error:
            if self._kind == "text/event-stream":
                await body(event(body_of(as_api_error(error))))
            else:
                log.warning("a sandbox stream ended by an error", exc_info=error)
        await body(b"", more=False)


async def from_socket(sock: socket.socket) -> AsyncIterator[bytes]:
    """What a socket sends, to its end."""
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(sock, PIECE):
        yield data


async def to_socket(body: Body, sock: socket.socket) -> None:
    """Pass the body to a socket, whose other end then sees the end; go on until the client is gone."""
    loop = asyncio.get_running_loop()
    try:
        async for piece in body.pieces():
            await loop.sock_sendall(sock, piece)
        sock.shutdown(socket.SHUT_WR)
    except ConnectionResetError:
        return
    except OSError:  # The guest has closed it; what it sent before is still passed on.
        async for _ in body.pieces():
            pass
    await body.gone()
