"""The same sandboxes for an event loop: every blocking call runs in a thread, and a cancelled command is killed.

async with AsyncSandboxes() as sandboxes:
    box = await sandboxes.create()
    result = await box.exec(["python3", "-c", "print(1)"])
    async for output in box.stream(["make"]):
        …
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from perilune.sandbox.client import Sandbox
from perilune.sandbox.execution import Execution
from perilune.sandbox.protocol import Capabilities, GuestFile, OnOutput, Output, Result, Spec, State
from perilune.sandbox.remote import RemoteSandbox, RemoteSandboxes
from perilune.sandbox.remote_execution import RemoteExecution
from perilune.sandbox.sandboxes import Sandboxes
from perilune.sandbox.store import Snapshot

T = TypeVar("T")
Made = TypeVar("Made", Sandbox, RemoteSandbox, list[Sandbox], Sequence[RemoteSandbox], Sandbox | RemoteSandbox)
MOST_THREADS = 512
"""Calls that wait at once; each command that runs holds one."""


class AsyncSandboxes:
    """See `sandboxes.Sandboxes`; the same arguments.

    Args:
        over: sandboxes that exist, in process, in a pool or of a service; they are closed with this, and `folder`, `sync` and
            `max_bytes` have no effect.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        sync: str = "batch",
        max_bytes: int = 64 << 30,
        over: Sandboxes | RemoteSandboxes | None = None,
    ) -> None:
        self.blocking = over or Sandboxes(folder, sync=sync, max_bytes=max_bytes)
        self._threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="sandbox")

    async def __aenter__(self) -> AsyncSandboxes:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._call(self.blocking.close)
        self._threads.shutdown(wait=False)

    async def _call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, functools.partial(function, *args, **options)
        )

    async def _made(self, function: Callable[..., Made], *args: Any, **options: Any) -> Made:
        """New sandboxes; those that are ready only after the caller was cancelled are destroyed."""
        future = asyncio.get_running_loop().run_in_executor(
            self._threads, functools.partial(function, *args, **options)
        )
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(
                lambda done: None if done.cancelled() or done.exception() else self._discard(done.result())
            )
            raise

    def _discard(self, made: Sandbox | RemoteSandbox | Sequence[Sandbox] | Sequence[RemoteSandbox]) -> None:
        for sandbox in made if isinstance(made, Sequence) else (made,):
            self._threads.submit(sandbox.destroy)

    async def create(self, spec: Spec | None = None, *, driver: str = "proc", name: str | None = None) -> AsyncSandbox:
        """See `Sandboxes.create`."""
        return AsyncSandbox(self, await self._made(self.blocking.create, spec, driver=driver, name=name))

    async def resume(self, snapshot: str, *, name: str | None = None) -> AsyncSandbox:
        """See `Sandboxes.resume`."""
        return AsyncSandbox(self, await self._made(self.blocking.resume, snapshot, name=name))

    async def open(self, name: str) -> AsyncSandbox:
        """See `Sandboxes.open`, and `RemoteSandboxes.open` for those of a service."""
        return AsyncSandbox(self, await self._call(self.blocking.open, name))

    async def remove(self, names: Sequence[str]) -> int:
        """See `Sandboxes.remove`."""
        return await self._call(self.blocking.remove, names)


class AsyncSandbox:
    """See `client.Sandbox`; that one, or a `RemoteSandbox`, is at `blocking`."""

    def __init__(self, owner: AsyncSandboxes, sandbox: Sandbox | RemoteSandbox) -> None:
        self.owner, self.blocking = owner, sandbox

    @property
    def id(self) -> str:
        """Its own name among all."""
        return self.blocking.id

    @property
    def name(self) -> str:
        """What the user called it, or the id."""
        return self.blocking.name

    @property
    def state(self) -> State:
        """Where it is in its life."""
        return self.blocking.state

    async def capabilities(self) -> Capabilities:
        """See `Sandbox.capabilities`."""
        return await self.owner._call(self.blocking.capabilities)

    async def exec(self, argv: Sequence[str], *, on_output: OnOutput | None = None, **options: Any) -> Result:
        """See `Sandbox.exec`; cancelling the call kills the command. `on_output` is called in the event loop."""
        execution = await self.owner._call(self.blocking.start, argv, **options)
        try:
            if on_output is not None:
                async for output in self._outputs(execution):
                    on_output(output)
            return await asyncio.shield(asyncio.ensure_future(self.owner._call(execution.result)))
        except asyncio.CancelledError:
            self.owner._threads.submit(execution.kill)
            raise

    async def stream(self, argv: Sequence[str], **options: Any) -> AsyncIterator[Output]:
        """Output of a command as it comes; leaving the loop early kills it."""
        execution = await self.owner._call(self.blocking.start, argv, **options)
        try:
            async for output in self._outputs(execution):
                yield output
        finally:
            await asyncio.shield(asyncio.ensure_future(self.owner._call(_end, execution)))

    async def _outputs(self, execution: Execution | RemoteExecution) -> AsyncIterator[Output]:
        outputs = iter(execution)

        def following() -> Output | None:
            return next(outputs, None)

        while (output := await self.owner._call(following)) is not None:
            yield output

    async def read_file(self, path: str, **options: Any) -> bytes:
        """See `Sandbox.read_file`."""
        return await self.owner._call(self.blocking.read_file, path, **options)

    async def write_file(self, path: str, data: bytes, **options: Any) -> None:
        """See `Sandbox.write_file`."""
        await self.owner._call(self.blocking.write_file, path, data, **options)

    async def list(self, path: str) -> list[GuestFile]:
        """See `Sandbox.list`."""
        return await self.owner._call(self.blocking.list, path)

    async def ports(self) -> list[int]:
        """See `Sandbox.ports`."""
        return await self.owner._call(self.blocking.ports)

    async def connect(self, port: int) -> socket.socket:
        """See `Sandbox.connect`; `asyncio.open_connection(sock=…)` takes it."""
        return await self.owner._call(self.blocking.connect, port)

    async def checkpoint(self) -> Snapshot:
        """See `Sandbox.checkpoint`."""
        return await self.owner._call(self.blocking.checkpoint)

    async def fork(self, count: int = 1, *, name: str | None = None) -> list[AsyncSandbox]:
        """See `Sandbox.fork`."""
        made = await self.owner._made(self.blocking.fork, count, name=name)
        return [AsyncSandbox(self.owner, one) for one in made]

    async def pause(self, *, keep_memory: bool = False) -> Snapshot | None:
        """See `Sandbox.pause`."""
        return await self.owner._call(self.blocking.pause, keep_memory=keep_memory)

    async def resume(self) -> None:
        """See `Sandbox.resume`."""
        await self.owner._call(self.blocking.resume)

    async def destroy(self) -> None:
        """See `Sandbox.destroy`."""
        await self.owner._call(self.blocking.destroy)


def _end(execution: Execution | RemoteExecution) -> None:
    execution.kill()
    execution.result()
