"""A uvicorn server on a socket of ours: bound before it starts, in this thread or in one of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import uvicorn

from perilune.errors import CapacityError, ConfigError

BACKLOG = 2048


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A socket that takes connections; port 0 takes a free one. Who connects waits until the application has started.

    Args:
        host, port: the address.
        flag: by which the user named the port.

    Raises:
        CapacityError: the port is taken.
        ConfigError: the address is not this machine's.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        return listener
    except BaseException as error:
        listener.close()
        if isinstance(error, OverflowError):
            raise ConfigError(f"{flag} {port} must be a whole number in 0..65535") from None
        if isinstance(error, socket.gaierror):
            raise ConfigError(f"--host {host} is not an address or name of this machine: {error.strerror}") from None
        if isinstance(error, OSError):
            raise CapacityError(
                f"cannot listen on {host} port {port}: {error.strerror}; choose another {flag}"
            ) from None
        raise


def url_of(listener: socket.socket) -> str:
    """Where a socket listens, without a trailing slash."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_config(app: Any, grace: int) -> uvicorn.Config:
    """How we run uvicorn: it says nothing but warnings, in the program's own log.

    Args:
        app: an ASGI application with a lifespan.
        grace: seconds that open connections have once it is told to stop.
    """
    return uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=grace, lifespan="on",
        log_config=None,
    )  # fmt: skip


class Server(uvicorn.Server):
    """uvicorn, and an event that is set once it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then tell."""
        await super().startup(sockets)
        self.accepting.set()


class ServerThread:
    """A server in a thread of its own, running once this is made; leaving the context stops it.

    Args:
        server: not started yet.
        listener: of `listen`; it is closed with the server.
        name: of the thread.
        on_end: called at the end, whatever it was.

    Attributes:
        url: where it listens, without a trailing slash.

    Raises:
        CapacityError: the server did not start.
    """

    def __init__(
        self, server: Server, listener: socket.socket, name: str, on_end: Callable[[], None] = lambda: None
    ) -> None:
        self.url = url_of(listener)
        self._server = server

        def run() -> None:
            try:
                with contextlib.closing(listener):
                    server.run(sockets=[listener])
            finally:
                on_end()
                server.accepting.set()

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()
        server.accepting.wait()
        if not server.started:
            raise CapacityError(f"the server did not start on {self.url}; its log says why")

    def close(self) -> None:
        """Stop: what runs is cut, the port is free when this returns."""
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
