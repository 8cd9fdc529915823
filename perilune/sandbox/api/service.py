"""The endpoints over one pool. `app.py` has their list."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp

from perilune import __version__
from perilune.config.parse import from_dict
from perilune.errors import CapacityError, RequestError
from perilune.http.access import Access
from perilune.http.errors import APIError, json_response
from perilune.sandbox.api import commands, streams
from perilune.sandbox.api.messages import HEADER_BYTES, Create, Exec, Fork, Pause, Window, decode, result_body
from perilune.sandbox.api.permissions import Permissions, ServiceLimits
from perilune.sandbox.client import Sandbox
from perilune.sandbox.drivers import DRIVERS
from perilune.sandbox.pool import Pool
from perilune.sandbox.protocol import NoSuchSandbox, Spec
from perilune.sandbox.removal import check_unneeded

T = TypeVar("T")
PAGE = Path(__file__).with_name("page.html")
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


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
        made = await self.call(self.pool.fork, request.path_params["name"], asked.count, prefix=asked.name)
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
        await self.call(self._command(request).kill)
        return Response(status_code=204)

    def _command(self, request: Request) -> commands.Command:
        command = self.running.get(request.path_params["id"])
        if command is None:
            raise NoSuchSandbox(f"no command {request.path_params['id']!r} runs")
        return command

    async def window(self, request: Request) -> Response:
        """PUT /v1/commands/ID/window: the client's terminal has another size."""
        window = await self._read(request, Window)
        await self._command(request).resize(window)
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
        names, home = [self._snapshot_name(request)], self.pool.home

        def delete() -> int:
            check_unneeded(home, names)
            return home.store.delete(names)

        return json_response({"freed_bytes": await self.call(delete)})

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
