"""One machine of a fleet: a pool, and the calls that others make on it. Plain data in and out; errors by name.

Ray makes an actor of `Node`; nothing here needs Ray, so that a node can be tested, and used, without it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from perilune.config.parse import from_dict
from perilune.errors import PeriluneError
from perilune.sandbox.client import Sandbox
from perilune.sandbox.fleet.transfer import Peer, arrive, pull
from perilune.sandbox.pool import Pool, PoolLimits
from perilune.sandbox.protocol import Spec
from perilune.sandbox.sandboxes import Sandboxes
from perilune.sandbox.wire_errors import field_of, name_of, rebuilt

T = TypeVar("T")
CALLS = frozenset(
    ("read_file", "write_file", "list", "ports", "checkpoint", "pause", "resume", "destroy", "fork", "exec")
)
"""What may be called on a sandbox by name."""


def answered(function: Callable[..., T]) -> Callable[..., dict[str, Any]]:
    """The function with its value or its typed error as data: an exception class need not survive another process's pickling."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> dict[str, Any]:
        try:
            return {"value": function(*arguments, **options)}
        except PeriluneError as error:
            return {"error": [name_of(error), str(error), field_of(error)]}

    return call


def value_of(answer: dict[str, Any]) -> Any:
    """The other end of `answered`: the value, or the error raised again."""
    if "error" in answer:
        raise rebuilt(*answer["error"])
    return answer["value"]


class Node:
    """A pool of this machine.

    Args:
        name: of the node in the fleet.
        folder: where its sandboxes and snapshots lie; its own.
        limits: fields of `PoolLimits` that differ from the defaults.
        sync: how snapshots reach the disk (`store.SYNCS`).
    """

    def __init__(self, name: str, folder: str, limits: dict[str, Any], sync: str) -> None:
        self.name = name
        self.pool = Pool(Sandboxes(Path(folder), sync=sync), PoolLimits(**limits))

    def about(self) -> dict[str, Any]:
        """Name, process, memory, and the snapshots and sandboxes that are here."""
        usage = self.pool.usage()
        return {
            "name": self.name, "pid": os.getpid(), "held": usage.held, "memory_bytes": usage.memory.total,
            "promised_bytes": usage.promised_bytes, "allowed_bytes": usage.allowed_bytes,
            "snapshots": self.pool.home.store.snapshots(), "sandboxes": self.pool.records(),
        }  # fmt: skip

    def _describe(self, sandbox: Sandbox) -> dict[str, Any]:
        return {
            "id": sandbox.id, "name": sandbox.name, "driver": sandbox.driver.name, "state": sandbox.state.value,
            "generation": sandbox.generation, "snapshot": sandbox.snapshot, "spec": sandbox.record.spec, "node": self.name,
        }  # fmt: skip

    @answered
    def create(self, spec: dict[str, Any], driver: str, name: str | None) -> dict[str, Any]:
        """See `Pool.create`."""
        return self._describe(self.pool.create(from_dict(Spec, spec), driver=driver, name=name))

    @answered
    def resume(self, snapshot: str, name: str | None) -> dict[str, Any]:
        """See `Pool.resume_snapshot`."""
        return self._describe(self.pool.resume_snapshot(snapshot, name=name))

    @answered
    def room(self, driver: str, spec: dict[str, Any]) -> str:
        """Why a sandbox of this kind would have to wait here, or ""."""
        return self.pool.admission.refuses(driver, from_dict(Spec, spec))

    @answered
    def show(self, sandbox: str) -> dict[str, Any]:
        """A sandbox as it is now."""
        return self._describe(self.pool.entry(sandbox).sandbox)

    @answered
    def call(self, sandbox: str, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """One of `CALLS` on a sandbox; a parked one wakes."""
        assert method in CALLS, f"{method} is no call of a sandbox"
        if method in ("pause", "resume", "destroy", "fork"):
            made = getattr(self.pool, method)(sandbox, *arguments, **options)
            if method == "fork":
                return [self._describe(fork) for fork in made]
            return asdict(made) if method == "pause" and made is not None else None
        with self.pool.use(sandbox) as box:
            value = getattr(box, method)(*arguments, **options)
        if method == "list":
            return [asdict(entry) for entry in value]
        return asdict(value) if method in ("checkpoint", "exec") else value

    def outputs(self, sandbox: str, argv: list[str], options: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A command's output as it comes, then its result; or an error."""
        try:
            with self.pool.use(sandbox) as box, box.start(argv, **options) as execution:
                for output in execution:
                    yield {"value": [output.stream, output.data]}
                yield {"value": asdict(execution.result())}
        except PeriluneError as error:
            yield {"error": [name_of(error), str(error), field_of(error)]}

    @answered
    def record(self, snapshot: str) -> bytes:
        """A snapshot's record, for another node."""
        return self.pool.home.store.export(snapshot)

    @answered
    def blob(self, name: str) -> bytes:
        """A blob's content, for another node, which checks it."""
        return self.pool.home.store.read(name)

    @answered
    def pull(self, snapshot: str, peers: list[Any]) -> dict[str, int]:
        """Fetch what this node lacks of a snapshot from other nodes' actors."""
        pulled = pull(self.pool.home.store, snapshot, [ActorPeer(actor) for actor in peers])
        return {"blobs": pulled.blobs, "bytes": pulled.bytes, "refused": pulled.refused}

    @answered
    def arrive(self, snapshot: str, peers: list[Any]) -> None:
        """Begin to fetch a snapshot from other nodes' actors; a machine may be resumed from it at once, anything else once it is here."""
        arrive(self.pool.home.store, snapshot, [ActorPeer(actor) for actor in peers])

    @answered
    def delete(self, snapshots: list[str]) -> int:
        """Delete those of the snapshots that are here; returns the bytes freed."""
        store = self.pool.home.store
        return store.delete([name for name in snapshots if store.snapshot_path(name).exists()])

    def close(self) -> None:
        """Pause everything; the next node on this folder finds it."""
        self.pool.close()


class ActorPeer(Peer):
    """Another node's store through its actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def record(self, snapshot: str) -> bytes:
        return self._ask(self._actor.record, snapshot)

    def blob(self, name: str) -> bytes:
        return self._ask(self._actor.blob, name)

    def _ask(self, method: Any, argument: str) -> bytes:
        from perilune.sandbox.fleet.actors import ask

        return value_of(ask(method.remote(argument)))
