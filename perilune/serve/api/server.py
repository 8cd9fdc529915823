"""Listening on a port: in this thread until interrupted, or in another one for as long as a handle is open."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from perilune.errors import CapacityError, ConfigError
from perilune.serve.api.access import LOOPBACK
from perilune.serve.api.app import Limits, create_app
from perilune.serve.engine import Engine


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, api_keys: tuple[str, ...], no_auth: bool) -> None:
    """Refuse to listen where others can connect, unless they need a key or the user has said that they need none.

    Raises:
        ConfigError: another address than this machine's own, without a key and without `no_auth`; or an empty key.
    """
    if any(not key.strip() for key in api_keys):
        raise ConfigError("an API key is empty; give a non-empty --api-key, or leave the flag out")
    if not is_loopback(host) and not api_keys and not no_auth:
        raise ConfigError(
            f"--host {host} can be reached by other machines, and there is no API key; give --api-key KEY, "
            "or say --no-auth, or listen on 127.0.0.1"
        )


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one.

    Raises:
        CapacityError: the port is taken.
        ConfigError: the address is not this machine's.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
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


def _server(engine: Engine, host: str, limits: Limits | None, api_keys: tuple[str, ...], grace: int) -> _Server:
    hosts = (LOOPBACK | {host}) if is_loopback(host) else None
    app = create_app(engine, limits=limits, api_keys=api_keys, hosts=hosts)
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
    """A server that runs in another thread.

    Attributes:
        url: where it listens, without a trailing slash.
    """

    url: str
    _server: _Server
    _thread: threading.Thread

    def close(self) -> None:
        """Stop: running answers are cut, the port is free when this returns."""
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> ServerHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve_in_thread(
    engine: Engine,
    port: int = 0,
    *,
    host: str = "127.0.0.1",
    limits: Limits | None = None,
    api_keys: tuple[str, ...] = (),
    no_auth: bool = False,
) -> ServerHandle:
    """Serve in a thread of this process; returns once the port answers. Port 0 takes a free one.

    Raises:
        ConfigError, CapacityError: see `check_exposure`; or the port is taken.
    """
    check_exposure(host, api_keys, no_auth)
    listener = _listen(host, port)
    url = _url(listener)
    server = _server(engine, host, limits, api_keys, grace=1)

    def run() -> None:
        try:
            server.run(sockets=[listener])
        finally:
            listener.close()
            server.accepting.set()

    thread = threading.Thread(target=run, name="perilune-http", daemon=True)
    thread.start()
    server.accepting.wait()
    if not server.started:
        raise CapacityError(f"the server did not start on {url}; its log says why")
    return ServerHandle(url, server, thread)


def serve(
    engine: Engine,
    port: int = 8000,
    *,
    host: str = "127.0.0.1",
    limits: Limits | None = None,
    api_keys: tuple[str, ...] = (),
    no_auth: bool = False,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve in this thread until interrupted (Ctrl-C, SIGTERM); running answers get a few seconds to end.

    Args:
        on_ready: called with the URL once the socket is bound.

    Raises:
        ConfigError, CapacityError: see `serve_in_thread`.
    """
    check_exposure(host, api_keys, no_auth)
    listener = _listen(host, port)
    server = _server(engine, host, limits, api_keys, grace=5)
    if on_ready is not None:
        on_ready(_url(listener))
    with contextlib.closing(listener):
        server.run(sockets=[listener])
