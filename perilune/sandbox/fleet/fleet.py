"""A fleet: sandboxes of several machines by one interface.

A new sandbox goes to the machine that holds the least memory of those with room. A snapshot is resumed where it lies (sticky); where
there is no room, or that machine has gone, another one fetches what it lacks from those that have it. With `copies` > 1 every
checkpoint and pause is copied before it counts, so that the end of a machine costs what ran there and no snapshot.

with Fleet(Path("/var/lib/perilune"), address="auto", copies=2) as fleet:
    box = fleet.create()
    box.exec(["make"])
    snapshot = box.checkpoint()
    again = fleet.resume(snapshot.id)
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perilune.config.parse import from_dict, to_dict
from perilune.errors import CapacityError, ConfigError, SandboxError
from perilune.sandbox.fleet import actors
from perilune.sandbox.fleet.actors import NodeGone, ask
from perilune.sandbox.fleet.node import value_of
from perilune.sandbox.home import default_folder
from perilune.sandbox.pool import PoolLimits
from perilune.sandbox.protocol import Guarantee, GuestFile, NoSuchSandbox, OnOutput, Output, Result, Spec, State
from perilune.sandbox.store import Snapshot


class Fleet:
    """All machines of a Ray cluster.

    Args:
        folder: under which each machine keeps its own, on its own disk; None = `home.default_folder()`.
        address: of the Ray cluster ("auto" = the one of this machine); None = one is started here.
        limits: of the pool of each machine.
        copies: machines that have each snapshot before `checkpoint` and `pause` return.
        sync: how snapshots reach the disk.

    Raises:
        ConfigError: Ray is not installed, or copies are more than there are machines.
    """

    def __init__(
        self, folder: str | Path | None = None, *, address: str | None = None, limits: PoolLimits | None = None, copies: int = 1,
        sync: str = "batch",
    ) -> None:  # fmt: skip
        self._began = actors.begin(address)
        self.nodes: dict[str, Any] = {}
        self.copies = copies
        if not 1 <= copies <= (most := len(actors.machines())):
            self.close()
            raise ConfigError(f"copies={copies} must be 1 to {most}, the machines of this cluster")
        changed = {} if limits is None else asdict(limits)
        try:
            self.nodes = actors.start_nodes(default_folder() if folder is None else Path(folder), changed, sync)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, node: str, call: Callable[[Any], Any]) -> Any:
        """A node's answer; one that has ended leaves the fleet.

        Raises:
            NodeGone: it has ended, now or before.
        """
        if node not in self.nodes:
            raise NodeGone(f"the machine {node} has left the fleet; what ran there is lost")
        try:
            return ask(call(self.nodes[node]))
        except NodeGone:
            self.nodes.pop(node, None)
            raise NodeGone(f"the machine {node} has left the fleet; what ran there is lost") from None

    def about(self) -> list[dict[str, Any]]:
        """Each machine: memory, sandboxes, snapshots. Those that have ended are left out from now on."""
        found = []
        for name in list(self.nodes):
            with contextlib.suppress(NodeGone):
                found.append(self.ask(name, lambda actor: actor.about.remote()))
        return sorted(found, key=lambda about: (about["memory_bytes"] + about["promised_bytes"], about["name"]))

    def _with_room(self, driver: str, spec: dict[str, Any], names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Of these machines the ones with room now, in the same order; and why the others have none."""
        roomy, reasons = [], []
        for name in names:
            with contextlib.suppress(NodeGone):
                why = value_of(self.ask(name, lambda actor: actor.room.remote(driver, spec)))
                if why:
                    reasons.append(f"{name}: {why}")
                else:
                    roomy.append(name)
        return roomy, reasons

    def create(self, spec: Spec | None = None, *, driver: str = "proc", name: str | None = None) -> FleetSandbox:
        """A new sandbox on the machine that holds least.

        Raises:
            CapacityError: no machine has room; says why for each.
            DriverUnavailable, SandboxError: see `Pool.create`.
        """
        values = to_dict(spec or Spec())
        roomy, reasons = self._with_room(driver, values, [about["name"] for about in self.about()])
        for node in roomy:
            with contextlib.suppress(NodeGone, CapacityError):
                return self._made(value_of(self.ask(node, lambda actor: actor.create.remote(values, driver, name))))
        raise CapacityError(f"no machine of the fleet has room: {'; '.join(reasons) or 'none is left'}")

    def holders(self, snapshot: str) -> list[str]:
        """Machines that have a snapshot."""
        return [about["name"] for about in self.about() if snapshot in about["snapshots"]]

    def resume(self, snapshot: str, *, name: str | None = None) -> FleetSandbox:
        """A new sandbox from a snapshot: where it lies, or, without room there, where what is missing can be fetched to.

        A virtual machine runs there before all of it has come; it is lost if what it touches can then be had from nobody any more.

        Raises:
            NoSuchSandbox: no machine that is left has it.
            CapacityError: no machine has room.
            Mismatch, SandboxError: see `Sandboxes.resume`.
        """
        abouts = self.about()
        holders = [about["name"] for about in abouts if snapshot in about["snapshots"]]
        if not holders:
            raise NoSuchSandbox(f"snapshot {snapshot} is with none of the {len(abouts)} machines that are left")
        record = self._record(snapshot, holders)
        others = [about["name"] for about in abouts if about["name"] not in holders]
        roomy, reasons = self._with_room(record.driver, record.spec, [*holders, *others])
        for node in roomy:
            with contextlib.suppress(NodeGone, CapacityError):
                if node not in holders:
                    peers = [self.nodes[holder] for holder in holders if holder in self.nodes]
                    value_of(self.ask(node, lambda actor, peers=peers: actor.arrive.remote(snapshot, peers)))
                return self._made(value_of(self.ask(node, lambda actor: actor.resume.remote(snapshot, name))))
        raise CapacityError(f"no machine of the fleet has room: {'; '.join(reasons) or 'none is left'}")

    def _record(self, snapshot: str, holders: Sequence[str]) -> Snapshot:
        for holder in holders:
            with contextlib.suppress(NodeGone):
                record = value_of(self.ask(holder, lambda actor: actor.record.remote(snapshot)))
                return Snapshot(**json.loads(record.split(b"\n")[0]))
        raise NoSuchSandbox(f"snapshot {snapshot}: the machines that had it have left the fleet")

    def move(self, snapshot: str, node: str) -> dict[str, int]:
        """Have a snapshot on a machine, too; returns blobs, bytes and refused answers.

        Raises:
            NoSuchSandbox, SandboxError, StoreFull: see `transfer.pull`.
        """
        peers = [self.nodes[name] for name in self.holders(snapshot) if name != node]
        return value_of(self.ask(node, lambda actor: actor.pull.remote(snapshot, peers)))

    def protect(self, snapshot: str) -> list[str]:
        """Copy a snapshot until `copies` machines have it, those that hold least first; returns the machines.

        Raises:
            SandboxError: fewer machines than that are left, or could take it.
        """
        abouts = self.about()
        having = [about["name"] for about in abouts if snapshot in about["snapshots"]]
        failures = []
        for name in (about["name"] for about in abouts if about["name"] not in having):
            if len(having) >= self.copies:
                break
            try:
                self.move(snapshot, name)
                having.append(name)
            except SandboxError as error:
                failures.append(f"{name}: {error}")
        if len(having) < self.copies:
            raise SandboxError(
                f"snapshot {snapshot} has {len(having)} of {self.copies} copies: {'; '.join(failures) or 'no other machine is left'}"
            )
        return having

    def open(self, name: str) -> FleetSandbox:
        """A sandbox of the fleet by name or id. Raises NoSuchSandbox; GuestLost for one that is lost."""
        for about in self.about():
            if any(name in (record["id"], record["name"]) for record in about["sandboxes"]):
                return self._made(value_of(self.ask(about["name"], lambda actor: actor.show.remote(name))))
        raise NoSuchSandbox(f"there is no sandbox {name!r} on the {len(self.nodes)} machines of the fleet")

    def delete(self, snapshots: Sequence[str]) -> int:
        """Delete snapshots on every machine; returns the bytes freed."""
        names = list(snapshots)
        return sum(value_of(self.ask(node, lambda actor: actor.delete.remote(names))) for node in list(self.nodes))

    def _made(self, body: dict[str, Any]) -> FleetSandbox:
        return FleetSandbox(self, body)

    def close(self) -> None:
        """Pause everything, end the actors, leave the cluster if this had joined it."""
        package = actors.ray()
        for name, actor in list(self.nodes.items()):
            with contextlib.suppress(SandboxError):
                self.ask(name, lambda actor: actor.close.remote())
            package.kill(actor)
        self.nodes.clear()
        if self._began:
            package.shutdown()
            self._began = False


class FleetSandbox:
    """A sandbox on some machine of the fleet; the calls of `client.Sandbox`, without terminals and ports.

    Attributes:
        node: the machine that it is on.
        state, generation, snapshot: as of the last answer.
    """

    def __init__(self, fleet: Fleet, body: dict[str, Any]) -> None:
        self.fleet, self.node = fleet, body["node"]
        self.id, self.name, self.driver = body["id"], body["name"], body["driver"]
        self.spec = from_dict(Spec, body["spec"])
        self.state, self.generation, self.snapshot = State(body["state"]), body["generation"], body["snapshot"]

    def __repr__(self) -> str:
        return f"FleetSandbox({self.name!r}, {self.driver}, {self.state.value}, on {self.node})"

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        answer = self.fleet.ask(self.node, lambda actor: actor.call.remote(self.id, method, arguments, options))
        return value_of(answer)

    def exec(self, argv: Sequence[str], *, on_output: OnOutput | None = None, **options: Any) -> Result:
        """See `Sandbox.exec`; stdin must be bytes. Raises NodeGone when its machine ends under it."""
        if isinstance(options.get("stdin"), int):
            raise ConfigError("a fleet's command takes its input as bytes, not as a descriptor")
        if on_output is None:
            return _result(self._call("exec", list(argv), **options))
        value: Any = None
        for value in self._outputs(list(argv), options):
            if isinstance(value, list):
                on_output(Output(*value))
        return _result(value)

    def _outputs(self, argv: list[str], options: dict[str, Any]) -> Any:
        if self.node not in self.fleet.nodes:
            raise NodeGone(f"the machine {self.node} has left the fleet; what ran there is lost")
        method = self.fleet.nodes[self.node].outputs.options(num_returns="streaming")
        references = method.remote(self.id, argv, options)
        for reference in references:
            yield value_of(self.fleet.ask(self.node, lambda actor, one=reference: one))

    def read_file(self, path: str, **options: Any) -> bytes:
        """See `Sandbox.read_file`."""
        return self._call("read_file", path, **options)

    def write_file(self, path: str, data: bytes, **options: Any) -> None:
        """See `Sandbox.write_file`."""
        self._call("write_file", path, data, **options)

    def list(self, path: str) -> list[GuestFile]:
        """See `Sandbox.list`."""
        return [GuestFile(**entry) for entry in self._call("list", path)]

    def ports(self) -> list[int]:
        """See `Sandbox.ports`."""
        return self._call("ports")

    def checkpoint(self) -> Snapshot:
        """See `Sandbox.checkpoint`; `Fleet.copies` machines have it when this returns."""
        return self._protected(self._call("checkpoint"))

    def pause(self, *, keep_memory: bool = False) -> Snapshot | None:
        """See `Sandbox.pause`; `Fleet.copies` machines have its snapshot when this returns."""
        saved = self._call("pause", keep_memory=keep_memory)
        self.state = State.PAUSED
        return None if saved is None else self._protected(saved)

    def _protected(self, saved: dict[str, Any]) -> Snapshot:
        snapshot = Snapshot(**saved)
        self.snapshot = snapshot.id
        if self.fleet.copies > 1:
            self.fleet.protect(snapshot.id)
        return snapshot

    def resume(self) -> None:
        """See `Sandbox.resume`; on the machine where it is."""
        self._call("resume")
        self.state = State.RUNNING

    def fork(self, count: int = 1, *, name: str | None = None) -> Sequence[FleetSandbox]:
        """See `Sandbox.fork`: copies on the same machine, where all but their changes is shared."""
        return [FleetSandbox(self.fleet, body) for body in self._call("fork", count, prefix=name)]

    def destroy(self) -> None:
        """See `Sandbox.destroy`."""
        with contextlib.suppress(NoSuchSandbox):
            self._call("destroy")
        self.state = State.DEAD


def _result(values: dict[str, Any]) -> Result:
    return Result(**{**values, "guarantees": tuple(Guarantee(**one) for one in values["guarantees"])})
