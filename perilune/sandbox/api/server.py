"""Listening on a port: in this thread until interrupted, or in another one for as long as a handle is open."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvicorn

from perilune.errors import CapacityError, ConfigError
from perilune.sandbox.api.access import LOOPBACK, check_exposure, is_loopback
from perilune.sandbox.api.app import create_app
from perilune.sandbox.pool import Pool


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one.

    Raises:
        CapacityError: the port is taken.
        ConfigError: the address is not this machine's.
    """
    try:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        return listener
    except OverflowError:
        raise ConfigError(f"--port {port} must be a whole number in 0..65535") from None
    except OSError as error:
        listener.close()
        if isinstance(error, socket.gaierror):
            raise ConfigError(f"--host {host} is not an address or name of this machine: {error.strerror}") from None
        raise CapacityError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from None


class _Server(uvicorn.Server):
    """uvicorn, and an event that is set once it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then tell."""
        await super().startup(sockets)
        self.accepting.set()


def _server(pool: Pool, host: str, grace: int, options: dict[str, Any]) -> _Server:
    hosts = (LOOPBACK | {host}) if is_loopback(host) else None
    app = create_app(pool, hosts=hosts, **options)
    return _Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=grace,
            lifespan="on",
        )
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass
class ServerHandle:
    """A server that runs in another thread; the pool stays its maker's.

    Attributes:
        url: where it listens, without a trailing slash.
    """

    url: str
    _server: _Server
    _thread: threading.Thread

    def close(self) -> None:
        """Stop: running commands are ended, the port is free when this returns."""
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> ServerHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve_in_thread(
    pool: Pool, port: int = 0, *, host: str = "127.0.0.1", no_auth: bool = False, **options: Any
) -> ServerHandle:
    """Serve in a thread of this process; returns once the port answers.

    Args:
        port: 0 takes a free one.
        options: `api_keys`, `limits`, `permissions` of `create_app`.

    Raises:
        ConfigError, CapacityError: see `check_exposure`; or the port is taken.
    """
    check_exposure(host, options.get("api_keys", ()), no_auth)
    listener = _listen(host, port)
    url = _url(listener)
    server = _server(pool, host, 1, options)

    def run() -> None:
        try:
            server.run(sockets=[listener])
        finally:
            listener.close()
            server.accepting.set()

    thread = threading.Thread(target=run, name="perilune-sandbox-http", daemon=True)
    thread.start()
    server.accepting.wait()
    if not server.started:
        raise CapacityError(f"the server did not start on {url}; its log says why")
    return ServerHandle(url, server, thread)


def serve(
    pool: Pool, port: int, *, host: str = "127.0.0.1", no_auth: bool = False,
    on_ready: Callable[[str], None] | None = None, **options: Any,
) -> None:  # fmt: skip
    """Serve in this thread until interrupted (Ctrl-C, SIGTERM); running commands get a few seconds to end.

    Args:
        on_ready: called with the URL once the socket is bound.
        options: see `serve_in_thread`.

    Raises:
        ConfigError, CapacityError: see `serve_in_thread`.
    """
    check_exposure(host, options.get("api_keys", ()), no_auth)
    listener = _listen(host, port)
    server = _server(pool, host, 5, options)
    if on_ready is not None:
        on_ready(_url(listener))
    with contextlib.closing(listener):
        server.run(sockets=[listener])
