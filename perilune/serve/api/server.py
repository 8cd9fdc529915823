"""Listening on ports: in this thread until a signal, or in another one for as long as a handle is open.

The first SIGTERM or Ctrl-C stops in order: `/ready` says no, new requests get 503, running ones may end until a deadline,
the rest gets 503 or an error event, and then the process ends. The second one stops at once. A server whose engine has
ended by a fault of its own says so with 503 and ends as well, so that whoever looks after it can start another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from perilune.errors import CapacityError, ConfigError
from perilune.serve.api.access import LOOPBACK
from perilune.serve.api.admin import create_admin_app
from perilune.serve.api.app import create_app
from perilune.serve.api.context import Context
from perilune.serve.api.envelope import unavailable
from perilune.serve.api.exposure import check_exposure, is_loopback
from perilune.serve.api.limits import Limits
from perilune.serve.engine import Engine, EngineClosed

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where a server listens, and who may ask.

    Attributes:
        host, port: of the API; port 0 takes a free one.
        api_keys: bearer keys of clients; empty = everybody who reaches the port.
        no_auth: listen on a public address without a key.
        admin_port: of the admin endpoints, on the loopback address; None = there are none, 0 = a free one.
        admin_keys: bearer keys of the admin port; empty = everybody on this machine.
        drain_seconds: how long running answers may go on after the first signal.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    no_auth: bool = False
    admin_port: int | None = None
    admin_keys: tuple[str, ...] = ()
    drain_seconds: float = 30.0

    def check(self) -> None:
        """ConfigError for an address that others reach without a key, or an empty key."""
        check_exposure(self.host, self.api_keys, self.no_auth)
        check_exposure("127.0.0.1", self.admin_keys, False)


def _listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections; port 0 takes a free one.

    Raises:
        CapacityError: the port is taken.
        ConfigError: the address is not this machine's.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)  # who connects from now on waits until the application has started
        return listener
    except OverflowError:
        raise ConfigError(f"--port {port} must be a whole number in 0..65535") from None
    except OSError as error:
        listener.close()
        if isinstance(error, socket.gaierror):
            raise ConfigError(f"--host {host} is not an address or name of this machine: {error.strerror}") from None
        raise CapacityError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from None


def _config(app: Starlette, grace: int) -> uvicorn.Config:
    return uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=grace, lifespan="on",
        log_config=None,
    )  # fmt: skip


class _Server(uvicorn.Server):
    """uvicorn that tells when it accepts connections, and drains before it stops.

    Args:
        app: the API's application.
        context: of the application.
        drain_seconds: see `Endpoint`.

    Attributes:
        accepting: set once it accepts connections.
    """

    def __init__(self, app: Starlette, context: Context, drain_seconds: float) -> None:
        super().__init__(_config(app, grace=1))
        self.accepting = threading.Event()
        self._context = context
        self._drain_seconds = drain_seconds
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then tell."""
        await super().startup(sockets)
        self.accepting.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: drain, or stop at once if it is the second one."""
        if self._context.exchanges.draining or not self.started:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what is cut now has nothing to say
            self.should_exit = self.force_exit = True
            return
        log.info("%s: waiting for %d answers", signal.Signals(sig).name, len(self._context.exchanges))
        self._context.exchanges.draining = True  # seen by requests at once; the rest is for the event loop
        asyncio.get_running_loop().call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._draining = asyncio.ensure_future(self.drain(self._drain_seconds))

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: a server whose engine has ended by a fault can answer nobody, and ends too."""
        exchanges = self._context.exchanges
        if self._context.engine.closed and not exchanges.draining:
            log.error("the engine has stopped; ending this server")
            exchanges.draining = True
            self._begin_drain()
        return await super().on_tick(counter)

    async def drain(self, seconds: float) -> None:
        """Let running answers end, cut the rest, and stop."""
        exchanges = self._context.exchanges
        exchanges.draining = True
        if not await exchanges.drained(seconds):
            cut = exchanges.abort(None, unavailable("the server is stopping", "draining"))
            log.warning("%d answers had not ended after %g s and were cut", cut, seconds)
            await exchanges.drained(1.0)
        self.should_exit = True


class _AdminServer(uvicorn.Server):
    """The admin port: it leaves signals to the other server, and ends with it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing."""
        yield


@dataclass
class _Bound:
    """A server on its socket.

    Attributes:
        url, admin_url: where it listens, without a trailing slash.
    """

    server: _Server
    listener: socket.socket
    admin_listener: socket.socket | None
    url: str
    admin_url: str | None

    def run(self) -> None:
        """Serve until it is told to stop."""
        try:
            self.server.run(sockets=[self.listener])
        finally:
            self.close()

    def close(self) -> None:
        """Free the ports."""
        self.listener.close()
        if self.admin_listener is not None:
            self.admin_listener.close()


def _bind(engine: Engine, endpoint: Endpoint, limits: Limits | None) -> _Bound:
    endpoint.check()
    listener = _listen(endpoint.host, endpoint.port)
    admin_listener = None
    if endpoint.admin_port is not None:
        try:
            admin_listener = _listen("127.0.0.1", endpoint.admin_port)
        except BaseException:
            listener.close()
            raise
    hosts = (LOOPBACK | {endpoint.host}) if is_loopback(endpoint.host) else None
    app = create_app(engine, limits=limits, api_keys=endpoint.api_keys, hosts=hosts)
    context: Context = app.state.context
    if admin_listener is not None:
        _with_admin(app, create_admin_app(context, endpoint.admin_keys), admin_listener)
    server = _Server(app, context, endpoint.drain_seconds)
    return _Bound(server, listener, admin_listener, _url(listener), _url(admin_listener) if admin_listener else None)


def _with_admin(app: Starlette, admin: Starlette, listener: socket.socket) -> None:
    """Serve the admin application for as long as the other one runs."""
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        server = _AdminServer(_config(admin, grace=1))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with inner(app) as state:
                yield state
        finally:
            server.should_exit = True
            await task

    app.router.lifespan_context = lifespan


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass
class ServerHandle:
    """A server that runs in another thread.

    Attributes:
        url, admin_url: where it listens, without a trailing slash.
        context: its parts.
    """

    url: str
    admin_url: str | None
    context: Context
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
    admin_port: int | None = None,
    admin_keys: tuple[str, ...] = (),
) -> ServerHandle:
    """Serve in a thread of this process; returns once the port answers. Port 0 takes a free one.

    Raises:
        ConfigError, CapacityError: see `Endpoint.check`; or the port is taken.
    """
    endpoint = Endpoint(
        host=host, port=port, api_keys=api_keys, no_auth=no_auth, admin_port=admin_port, admin_keys=admin_keys
    )
    bound = _bind(engine, endpoint, limits)
    server = bound.server

    def run() -> None:
        try:
            bound.run()
        finally:
            server.accepting.set()

    thread = threading.Thread(target=run, name="perilune-http", daemon=True)
    thread.start()
    server.accepting.wait()
    if not server.started:
        raise CapacityError(f"the server did not start on {bound.url}; its log says why")
    return ServerHandle(bound.url, bound.admin_url, server._context, server, thread)


def serve(
    engine: Engine,
    endpoint: Endpoint | None = None,
    *,
    limits: Limits | None = None,
    on_ready: Callable[[str, str | None], None] | None = None,
) -> None:
    """Serve in this thread until a signal; see the module for what the first and the second one do.

    Args:
        engine: answers.
        endpoint: where, and for whom.
        limits: of requests.
        on_ready: called with the URLs of the API and of the admin port once the sockets are bound.

    Raises:
        ConfigError, CapacityError: see `serve_in_thread`.
        KeyboardInterrupt: a second signal came before everything had ended.
        EngineClosed: the engine has ended by a fault of its own. Start the server again; a disk tier is still there.
    """
    bound = _bind(engine, endpoint or Endpoint(), limits)
    if on_ready is not None:
        on_ready(bound.url, bound.admin_url)
    bound.run()
    if bound.server.force_exit:
        raise KeyboardInterrupt
    if engine.closed:
        raise EngineClosed("the engine has stopped, and the server with it; the log says why. Start the server again")
