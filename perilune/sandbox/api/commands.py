"""A command of a request, from its first byte of input to its result."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from perilune.errors import RequestError
from perilune.sandbox.api import streams
from perilune.sandbox.api.messages import Exec, Window, result_body
from perilune.sandbox.client import Sandbox
from perilune.sandbox.execution import Execution
from perilune.sandbox.protocol import NoSuchSandbox, Output, Process, Result

if TYPE_CHECKING:
    from perilune.sandbox.api.service import Service


class Held:
    """A sandbox that a request uses over several calls; counted, and not parked meanwhile."""

    def __init__(self, service: Service, name: str) -> None:
        self.service = service
        self._counted, self._used = service.counted(), service.pool.use(name)
        self._open = True
        self.sandbox: Sandbox

    @staticmethod
    async def take(service: Service, name: str) -> Held:
        """Wake it if it is parked. Raises as `Pool.use`, and CapacityError."""
        held = Held(service, name)
        held._counted.__enter__()
        try:
            held.sandbox = await service.call(held._used.__enter__)
        except BaseException:
            held._counted.__exit__(None, None, None)
            raise
        return held

    async def give_back(self, error: BaseException | None = None) -> None:
        """End the use, telling the pool of an error that ended it. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        self._counted.__exit__(None, None, None)
        arguments = (type(error), error, error.__traceback__) if error is not None else (None, None, None)
        with contextlib.suppress(Exception):
            await self.service.call(self._used.__exit__, *arguments)


class Command:
    """A started command and the request that it belongs to."""

    def __init__(self, held: Held, body: streams.Body, running: Execution | Process, input_fd: int, stdin: int) -> None:
        self.id = uuid.uuid4().hex
        self._held, self._body, self._running, self._input, self._stdin = held, body, running, input_fd, stdin
        self._begun = time.monotonic()
        self._error: BaseException | None = None
        self._work: asyncio.Future[Any] | None = None
        self._open = asyncio.Lock()
        """Held while its terminal's descriptor is used beside its stream, and while it is closed."""
        held.service.running[self.id] = self

    def kill(self) -> None:
        """End it; its result still comes."""
        self._running.kill()

    async def resize(self, window: Window) -> None:
        """Give its terminal another size. Raises RequestError if it has none, NoSuchSandbox once it has ended."""
        if isinstance(self._running, Execution):
            raise RequestError(
                f"command {self.id} has no terminal; only one that was started with terminal=true has a size"
            )
        async with self._open:
            if self.id not in self._held.service.running:
                raise NoSuchSandbox(f"command {self.id} has ended")
            with contextlib.suppress(OSError):  # It ends just now.
                await self._held.service.call(self._running.resize, window.rows, window.columns)

    async def incoming(self) -> None:
        """Pass the request's body on as input; returns when the client is gone."""
        fd, self._input = self._input, -1
        await streams.feed(self._body, fd)

    async def whole(self) -> Result | None:
        """Its result at its end; None if the client goes away first."""
        assert isinstance(self._running, Execution), "a command on a terminal streams"
        incoming = asyncio.ensure_future(self.incoming())
        self._work = self._held.service.begin(self._running.result)
        try:
            await asyncio.wait((incoming, self._work), return_when=asyncio.FIRST_COMPLETED)
            return self._work.result() if self._work.done() else None
        except BaseException as error:
            self._error = error
            raise
        finally:
            incoming.cancel()

    async def events(self) -> AsyncIterator[bytes]:
        """Its name, its output as it comes, its result."""
        yield streams.event({"command": self.id})
        outputs = iter(self._running) if isinstance(self._running, Execution) else terminal_outputs(self._running)
        seconds = self._held.service.limits.heartbeat_seconds
        try:
            while True:
                self._work = self._held.service.begin(next, outputs, None)
                while not (await asyncio.wait((self._work,), timeout=seconds))[0]:
                    yield streams.HEARTBEAT
                output: Output | None = self._work.result()
                if output is None:
                    break
                yield streams.output_event(output.stream, output.data)
            yield streams.event({"result": await self._held.service.call(self._finish)})
        except BaseException as error:
            self._error = error
            raise

    def _finish(self) -> dict[str, Any]:
        if isinstance(self._running, Execution):
            return result_body(self._running.result(), output=False)
        done = self._running.finish()
        return {"code": done["code"], "signal": done["signal"], "seconds": time.monotonic() - self._begun}

    async def close(self) -> None:
        """Give everything back; a command that still runs is killed."""
        self._held.service.running.pop(self.id, None)
        if self._work is not None and not self._work.done():
            # A thread still reads from the command: its descriptors are closed only after it has seen the end.
            await self._held.service.call(self.kill)
            await asyncio.wait((self._work,))
            self._error = self._error or self._work.exception()
        for fd in {self._input, self._stdin} - {-1}:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._input = self._stdin = -1
        async with self._open:
            with contextlib.suppress(Exception):
                await self._held.service.call(self._running.close)
        await self._held.give_back(self._error)


async def begin(service: Service, name: str, asked: Exec, body: streams.Body) -> Command:
    """Start a command in a sandbox. Raises as `Pool.use` and `Sandbox.start`."""
    if asked.terminal and not asked.stream:
        raise RequestError("a command on a terminal needs stream=true")
    if asked.timeout is not None and not 0 < asked.timeout < 1e9:
        raise RequestError(f"timeout={asked.timeout:g} must be above zero seconds")
    held = await Held.take(service, name)
    read = write = -1
    try:
        options: dict[str, Any] = {"env": asked.env, "secrets": asked.secrets, "cwd": asked.cwd}
        if asked.terminal:
            size = (asked.rows, asked.columns)
            process = await service.call(held.sandbox.terminal, asked.argv, size=size, **options)
            return Command(held, body, process, os.dup(process.terminal), -1)
        read, write = os.pipe2(os.O_CLOEXEC)
        running = await service.call(held.sandbox.start, asked.argv, stdin=read, timeout=asked.timeout, **options)
        return Command(held, body, running, write, read)
    except BaseException as error:
        for fd in (read, write):
            if fd >= 0:
                os.close(fd)
        await held.give_back(error)
        raise


def terminal_outputs(process: Process) -> Iterator[Output]:
    """What a program writes on its terminal, until it has ended."""
    poll = select.poll()
    for fd in (process.terminal, process.status_fd()):
        poll.register(fd, select.POLLIN)
    ended = False
    while not ended:
        for fd, _ in poll.poll():
            if fd != process.terminal:
                ended = True
            elif data := _read(fd):
                yield Output("stdout", data)
            else:
                poll.unregister(fd)
    while select.select([process.terminal], [], [], 0)[0] and (data := _read(process.terminal)):
        yield Output("stdout", data)


def _read(fd: int) -> bytes:
    """A piece; b"" once no program holds the other end (EIO)."""
    with contextlib.suppress(BlockingIOError, OSError):
        return os.read(fd, streams.PIECE)
    return b""
