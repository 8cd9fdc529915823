"""The HTTP application: routes, limits and permissions over a `Pool`.

GET  /health  /  (a page that lists them)   /v1/drivers  /v1/usage
GET POST /v1/sandboxes            list, create            GET DELETE /v1/sandboxes/NAME
POST …/exec                       a line of JSON, then input; the answer is one object, or events as they come
GET PUT …/files?path=             POST …/checkpoint  …/fork  …/pause  …/resume
GET …/folder?path=  …/ports       POST …/tunnel/PORT      both ways as bytes
GET /v1/snapshots                 GET DELETE /v1/snapshots/ID   GET …/record   GET /v1/blobs/HASH
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune import __version__
from perilune.config.parse import from_dict
from perilune.errors import CapacityError, ConfigError, PeriluneError, RequestError
from perilune.sandbox.api import commands, streams
from perilune.sandbox.api.access import Access
from perilune.sandbox.api.envelope import APIError, json_response, on_error
from perilune.sandbox.api.messages import HEADER_BYTES, Create, Exec, Fork, Pause, decode, result_body
from perilune.sandbox.client import Sandbox
from perilune.sandbox.drivers import DRIVERS
from perilune.sandbox.pool import Pool
from perilune.sandbox.protocol import NoSuchSandbox, Spec

T = TypeVar("T")
log = logging.getLogger(__name__)
PAGE = Path(__file__).with_name("page.html")
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """What one request may ask for.

    Attributes:
        body_bytes: largest JSON body.
        file_bytes: largest file in either direction.
        commands: that run or connections to ports that are open at once; each holds a thread.
        heartbeat_seconds: silence after which a stream sends a comment, so that proxies keep it open.
    """

    body_bytes: int = 1 << 20
    file_bytes: int = 256 << 20
    commands: int = 256
    heartbeat_seconds: float = 10.0


@dataclass(frozen=True, kw_only=True)
class Permissions:
    """What of the host clients may ask for; nothing of it unless the operator says so.

    Attributes:
        images: folders (root file systems, or folders of them) that a sandbox may start from; names of images, for docker.
        trees: host folders that a guest may see, with all below them.
        networks: network policies.
    """

    images: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()
    networks: tuple[str, ...] = ("none",)

    def check(self, spec: Spec, driver: str) -> None:
        """Raise ConfigError for a wish that is not allowed."""
        # Without a slash it is one of the driver's own, such as a machine's "python"; docker's are everything that its engine has.
        own = spec.template == "host" or ("/" not in spec.template and driver != "docker")
        if (
            not own
            and spec.template not in self.images
            and not (driver != "docker" and _inside(spec.template, self.images))
        ):
            raise ConfigError(
                f"image {spec.template!r} may not be used here; allowed are: {', '.join(self.images) or 'none'}"
            )
        for tree in spec.trees:
            if not _inside(tree, self.trees):
                raise ConfigError(
                    f"tree {tree!r} may not be shown here; allowed are: {', '.join(self.trees) or 'none'}"
                )
        if spec.network not in self.networks:
            raise ConfigError(f"network {spec.network!r} is not allowed here; allowed are: {', '.join(self.networks)}")


def _inside(folder: str, allowed: tuple[str, ...]) -> bool:
    path = Path(folder).expanduser().resolve()
    return any(path.is_relative_to(Path(one).expanduser().resolve()) for one in allowed)


class Service:
    """Endpoints over one pool; what blocks runs in threads of its own."""

    def __init__(self, pool: Pool, limits: ServiceLimits, permissions: Permissions, access: Access) -> None:
        self.pool, self.limits, self.permissions, self.access = pool, limits, permissions, access
        self.running: dict[str, commands.Command] = {}
        self._open = 0
        self._threads = ThreadPoolExecutor(2 * limits.commands + 32, thread_name_prefix="sandbox-http")

    def close(self) -> None:
        """End commands and threads."""
        for command in list(self.running.values()):
            command.kill()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run something that blocks; it goes on to its end if the client does not wait for it."""
        return await asyncio.shield(self.begin(function, *args, **options))

    def begin(self, function: Callable[..., T], *args: Any, **options: Any) -> asyncio.Future[T]:
        """The same, as a future; to cancel it does not end the call."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, functools.partial(function, *args, **options))

    async def _body(self, request: Request, most: int) -> bytes:
        """The request body; refused when it grows over the limit, whatever its headers say."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                message = f"the body is larger than the allowed {most} bytes"
                raise APIError(413, message, code="body_too_large", headers={"Connection": "close"})
        return bytes(body)

    async def _read(self, request: Request, kind: type[T]) -> T:
        self.access.check(request)
        return decode(await self._body(request, self.limits.body_bytes), kind)

    # The service

    async def page(self, request: Request) -> Response:
        """GET /: the page. It is open; the requests that it makes are not."""
        self.access.check_site(request)
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": _PAGE_POLICY})

    async def health(self, request: Request) -> Response:
        """GET /health: the process is alive; open to everybody."""
        return json_response({"status": "ok", "version": __version__})

    async def drivers(self, request: Request) -> Response:
        """GET /v1/drivers: what each driver's probe found."""
        self.access.check(request)
        probes = [await self.call(self.pool.sandboxes.probe, name) for name in DRIVERS]
        return json_response({"drivers": [asdict(probe) for probe in probes]})

    async def usage(self, request: Request) -> Response:
        """GET /v1/usage: memory promised and held, sandboxes, bytes of the store."""
        self.access.check(request)
        usage = await self.call(self.pool.usage)
        return json_response(asdict(usage) | {"overcommit": usage.overcommit, "commands": len(self.running)})

    # Sandboxes

    def describe(self, sandbox: Sandbox) -> dict[str, Any]:
        """A sandbox as its client sees it."""
        record = sandbox.record
        return {
            "id": sandbox.id, "name": sandbox.name, "driver": sandbox.driver.name, "state": sandbox.state.value,
            "generation": sandbox.generation, "snapshot": sandbox.snapshot, "spec": record.spec, "created": record.created,
            "ends": record.ends, "parked": record.parked,
        }  # fmt: skip

    async def list(self, request: Request) -> Response:
        """GET /v1/sandboxes."""
        self.access.check(request)
        return json_response({"sandboxes": await self.call(self.pool.records)})

    async def create(self, request: Request) -> Response:
        """POST /v1/sandboxes."""
        asked = await self._read(request, Create)
        times = {"lifetime_seconds": asked.lifetime_seconds, "idle_seconds": asked.idle_seconds}
        if any(value is not None and not 0 <= value < 1e9 for value in times.values()):
            raise RequestError("lifetime_seconds and idle_seconds must be 0 (never) or above")
        if asked.snapshot is not None:
            if asked.spec is not None or asked.driver is not None:
                raise RequestError("snapshot says driver and spec already; leave them out")
            made = await self.call(self.pool.resume_snapshot, asked.snapshot, name=asked.name, **times)
        else:
            spec = from_dict(Spec, asked.spec or {})
            driver = asked.driver or "proc"
            self.permissions.check(spec, driver)
            made = await self.call(self.pool.create, spec, driver=driver, name=asked.name, **times)
        return json_response(self.describe(made), 201)

    async def show(self, request: Request) -> Response:
        """GET /v1/sandboxes/NAME."""
        self.access.check(request)
        entry = await self.call(self.pool.entry, request.path_params["name"])
        return json_response(self.describe(entry.sandbox))

    async def destroy(self, request: Request) -> Response:
        """DELETE /v1/sandboxes/NAME."""
        self.access.check(request)
        await self.call(self.pool.destroy, request.path_params["name"])
        return Response(status_code=204)

    async def _with(self, request: Request, function: Callable[[Sandbox], T]) -> T:
        name = request.path_params["name"]

        def work() -> T:
            with self.pool.use(name) as sandbox:
                return function(sandbox)

        return await self.call(work)

    async def checkpoint(self, request: Request) -> Response:
        """POST …/checkpoint."""
        self.access.check(request)
        return json_response(asdict(await self._with(request, lambda sandbox: sandbox.checkpoint())), 201)

    async def fork(self, request: Request) -> Response:
        """POST …/fork."""
        asked = await self._read(request, Fork)
        made = await self.call(self.pool.fork, request.path_params["name"], asked.count)
        return json_response({"sandboxes": [self.describe(fork) for fork in made]}, 201)

    async def pause(self, request: Request) -> Response:
        """POST …/pause."""
        asked = await self._read(request, Pause)
        saved = await self.call(self.pool.pause, request.path_params["name"], keep_memory=asked.keep_memory)
        return json_response({"snapshot": None if saved is None else asdict(saved)})

    async def resume(self, request: Request) -> Response:
        """POST …/resume."""
        self.access.check(request)
        return json_response(self.describe(await self.call(self.pool.resume, request.path_params["name"])))

    async def read_file(self, request: Request) -> Response:
        """GET …/files?path=."""
        self.access.check(request)
        path = self._path(request)
        data = await self._with(request, lambda box: box.read_file(path, max_bytes=self.limits.file_bytes))
        return Response(data, media_type="application/octet-stream")

    async def write_file(self, request: Request) -> Response:
        """PUT …/files?path=&mode=644."""
        self.access.check(request)
        path, mode = self._path(request), request.query_params.get("mode", "644")
        if not mode or len(mode) > 4 or not set(mode) <= set("01234567"):
            raise RequestError(f"mode {mode!r} must be octal, like 644 or 755")
        data = await self._body(request, self.limits.file_bytes)
        await self._with(request, lambda sandbox: sandbox.write_file(path, data, mode=int(mode, 8)))
        return Response(status_code=204)

    def _path(self, request: Request) -> str:
        path = request.query_params.get("path", "")
        if not path.startswith("/") or "\0" in path:
            raise RequestError(f"the query needs path=/…, an absolute path of the guest; given: {path!r}")
        return path

    async def folder(self, request: Request) -> Response:
        """GET …/folder?path=."""
        self.access.check(request)
        path = self._path(request)
        return json_response(
            {"entries": [asdict(one) for one in await self._with(request, lambda box: box.list(path))]}
        )

    async def ports(self, request: Request) -> Response:
        """GET …/ports."""
        self.access.check(request)
        return json_response({"ports": await self._with(request, lambda sandbox: sandbox.ports())})

    # Commands and connections

    @contextlib.contextmanager
    def counted(self) -> Any:
        """Count a command or a connection against the limit. Raises CapacityError."""
        if self._open >= self.limits.commands:
            raise CapacityError(
                f"{self._open} commands and connections are open, and {self.limits.commands} may; try again later"
            )
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def exec(self, request: Request) -> ASGIApp:
        """POST …/exec."""
        self.access.check(request)
        body = streams.Body(request.receive)
        try:
            asked = decode(await body.line(HEADER_BYTES), Exec)
        except ValueError as error:
            raise RequestError(str(error)) from None
        command = await commands.begin(self, request.path_params["name"], asked, body)
        if asked.stream:
            return streams.Answer(command.events(), command.incoming(), command.close, "text/event-stream")
        try:
            result = await command.whole()
        finally:
            await asyncio.shield(command.close())
        if result is None:
            raise ClientDisconnect
        return json_response(result_body(result, output=True))

    async def kill(self, request: Request) -> Response:
        """DELETE /v1/commands/ID: end a command that streams; its result still comes."""
        self.access.check(request)
        command = self.running.get(request.path_params["id"])
        if command is None:
            raise NoSuchSandbox(f"no command {request.path_params['id']!r} runs")
        await self.call(command.kill)
        return Response(status_code=204)

    async def tunnel(self, request: Request) -> ASGIApp:
        """POST …/tunnel/PORT: the request's body goes to the port, what the port says is the answer's body."""
        self.access.check(request)
        held = await commands.Held.take(self, request.path_params["name"])
        try:
            sock = await self.call(held.sandbox.connect, request.path_params["port"])
        except BaseException as error:
            await held.give_back(error)
            raise
        sock.setblocking(False)

        async def close() -> None:
            sock.close()
            await held.give_back()

        body = streams.Body(request.receive)
        return streams.Answer(
            streams.from_socket(sock), streams.to_socket(body, sock), close, "application/octet-stream"
        )

    # Snapshots

    async def snapshots(self, request: Request) -> Response:
        """GET /v1/snapshots."""
        self.access.check(request)
        return json_response({"snapshots": await self.call(self.pool.sandboxes.saved)})

    def _snapshot_name(self, request: Request) -> str:
        self.access.check(request)
        name, store = request.path_params["id"], self.pool.home.store
        if not store.snapshot_path(name).exists():
            raise NoSuchSandbox(f"there is no snapshot {name!r} here")
        return name

    async def snapshot(self, request: Request) -> Response:
        """GET /v1/snapshots/ID."""
        return json_response(asdict(await self.call(self.pool.home.store.snapshot, self._snapshot_name(request))))

    async def delete_snapshot(self, request: Request) -> Response:
        """DELETE /v1/snapshots/ID."""
        freed = await self.call(self.pool.home.store.delete, [self._snapshot_name(request)])
        return json_response({"freed_bytes": freed})

    async def record(self, request: Request) -> Response:
        """GET /v1/snapshots/ID/record: its record as another store takes it."""
        name = self._snapshot_name(request)
        return Response(await self.call(self.pool.home.store.snapshot_path(name).read_bytes), media_type="text/plain")

    async def blob(self, request: Request) -> Response:
        """GET /v1/blobs/HASH: a stored piece, by the hash that whoever fetches it checks."""
        self.access.check(request)
        name = request.path_params["hash"]
        if len(name) != 64 or not set(name) <= set("0123456789abcdef"):
            raise RequestError(f"{name!r} is no blob's name: 64 hexadecimal digits")
        try:
            data = await self.call(self.pool.home.store.blob_path(name).read_bytes)
        except FileNotFoundError:
            raise NoSuchSandbox(f"there is no blob {name} here") from None
        return Response(data, media_type="application/octet-stream")


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
        ("DELETE", "/v1/commands/{id}", service.kill), ("GET", "/v1/snapshots", service.snapshots),
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
