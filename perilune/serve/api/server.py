"""Listening on ports: in this thread until a signal, or in another one for as long as a handle is open.

The first SIGTERM or Ctrl-C stops in order: `/ready` says no, new requests get 503, running ones may end until a deadline,
the rest gets 503 or an error event, and then the process ends. The second one stops at once. A server whose engine has
ended by a fault of its own says so with 503 and ends as well, so that whoever looks after it can start another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from perilune.http.exposure import check_exposure, host_names
from perilune.http.listening import Server, ServerThread, listen, server_config, url_of
from perilune.serve.api.admin import create_admin_app
from perilune.serve.api.app import create_app
from perilune.serve.api.context import Context
from perilune.serve.api.envelope import unavailable
from perilune.serve.api.limits import Limits
from perilune.serve.engine import Engine, EngineClosed

# How long a thread that computes may keep the interpreter while another one wants it: the engine's thread has a step of a
# millisecond to launch, when the one that writes answers is at work.
SWITCH_SECONDS = 0.0005

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


class _Server(Server):
    """A server that drains before it stops.

    Args:
        app: the API's application.
        context: of the application.
        drain_seconds: see `Endpoint`.
    """

    def __init__(self, app: Starlette, context: Context, drain_seconds: float) -> None:
        super().__init__(server_config(app, grace=1))
        self._context = context
        self._drain_seconds = drain_seconds
        self._draining: asyncio.Task[None] | None = None

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
    """A server, and the sockets that it is going to use."""

    server: _Server
    context: Context
    listener: socket.socket
    admin_listener: socket.socket | None

    @property
    def admin_url(self) -> str | None:
        """Where the admin port listens, without a trailing slash."""
        return None if self.admin_listener is None else url_of(self.admin_listener)

    def close(self) -> None:
        """Free the ports."""
        self.listener.close()
        if self.admin_listener is not None:
            self.admin_listener.close()


def _bind(engine: Engine, endpoint: Endpoint, limits: Limits | None) -> _Bound:
    endpoint.check()
    listener = listen(endpoint.host, endpoint.port)
    admin_listener = None
    if endpoint.admin_port is not None:
        try:
            admin_listener = listen("127.0.0.1", endpoint.admin_port, "--admin-port")
        except BaseException:
            listener.close()
            raise
    app = create_app(engine, limits=limits, api_keys=endpoint.api_keys, hosts=host_names(endpoint.host))
    context: Context = app.state.context
    if admin_listener is not None:
        _with_admin(app, create_admin_app(context, endpoint.admin_keys), admin_listener)
    return _Bound(_Server(app, context, endpoint.drain_seconds), context, listener, admin_listener)


def _with_admin(app: Starlette, admin: Starlette, listener: socket.socket) -> None:
    """Serve the admin application for as long as the other one runs."""
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        server = _AdminServer(server_config(admin, grace=1))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with inner(app) as state:
                yield state
        finally:
            server.should_exit = True
            await task

    app.router.lifespan_context = lifespan


class ServerHandle(ServerThread):
    """A server that runs in another thread; closing it cuts running answers.

    Attributes:
        admin_url: where the admin port listens; None = there is none.
        context: its parts.
    """

    def __init__(self, bound: _Bound) -> None:
        self.admin_url, self.context = bound.admin_url, bound.context
        super().__init__(bound.server, bound.listener, "perilune-http", bound.close)


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
    return ServerHandle(_bind(engine, endpoint, limits))


def _keep_what_is_there() -> None:
    """Model, compilers and recordings are there for good: the garbage collector, which stops everybody, need not look at them
    again and again."""
    gc.collect()
    gc.freeze()


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
    bound.context.on_warm = _keep_what_is_there
    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(interval, SWITCH_SECONDS))
    try:
        if on_ready is not None:
            on_ready(url_of(bound.listener), bound.admin_url)
        bound.server.run(sockets=[bound.listener])
    finally:
        bound.close()
        gc.unfreeze()
        sys.setswitchinterval(interval)
    if bound.server.force_exit:
        raise KeyboardInterrupt
    if engine.closed:
        raise EngineClosed("the engine has stopped, and the server with it; the log says why. Start the server again")
