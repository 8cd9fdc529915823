"""All sandboxes of a folder: make, resume, open again in another process, and end them together.

with Sandboxes() as sandboxes:
    box = sandboxes.create()
    box.exec(["sh", "-c", "echo hello > /workspace/a"])
    snapshot = box.checkpoint()
    judge, = box.fork(1)
"""

from __future__ import annotations

import contextlib
import secrets as randomness
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perilune.config.parse import from_dict, to_dict
from perilune.errors import SandboxError
from perilune.sandbox import removal, template
from perilune.sandbox.client import Sandbox
from perilune.sandbox.drivers import driver as make_driver
from perilune.sandbox.guest import linux
from perilune.sandbox.home import Home, Record
from perilune.sandbox.protocol import Driver, Mismatch, Probe, Spec, State
from perilune.sandbox.store import Snapshot


class Sandboxes:
    """All sandboxes of a folder, as far as this process made or opened them; closing destroys those that live.

    Args:
        folder: where records, snapshots and templates lie; None = `home.default_folder()`.
        sync: how snapshots are written (`store.SYNCS`).
        max_bytes: most bytes of stored blobs.
    """

    def __init__(self, folder: str | Path | None = None, *, sync: str = "batch", max_bytes: int = 64 << 30) -> None:
        self.home = Home(folder, sync=sync, max_bytes=max_bytes)
        self._drivers: dict[str, Driver] = {}
        self._probes: dict[str, Probe] = {}
        self._live: dict[str, Sandbox] = {}
        self._lock = threading.RLock()

    def __enter__(self) -> Sandboxes:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def driver(self, name: str) -> Driver:
        """The driver of that name, made once."""
        with self._lock:
            if name not in self._drivers:
                self._drivers[name] = make_driver(name, self.home.folder / name)
            return self._drivers[name]

    def probe(self, name: str) -> Probe:
        """What the driver found by running something; looked at once."""
        if name not in self._probes:
            self._probes[name] = self.driver(name).probe()
        return self._probes[name]

    def create(self, spec: Spec | None = None, *, driver: str = "proc", name: str | None = None) -> Sandbox:
        """A new sandbox, running.

        Raises:
            DriverUnavailable: the kernel refuses what the driver needs.
            SandboxError: the name is taken.
        """
        return self._make(spec or Spec(), driver, name, None)

    def _make(self, spec: Spec, driver: str, name: str | None, snapshot: Snapshot | None) -> Sandbox:
        chosen = self.driver(driver)
        record = self.home.new_record(f"sb{randomness.token_hex(6)}", name, driver, to_dict(spec))
        record.snapshot = snapshot.id if snapshot else None
        sandbox = Sandbox(self, chosen, spec, record)
        try:
            sandbox._begin(snapshot.layer if snapshot else None)
            self.home.save(record)
        except BaseException:
            sandbox._end_machine()
            self.home.forget(record)
            raise
        with self._lock:
            self._live[sandbox.id] = sandbox
        return sandbox

    def checked(self, name: str) -> Snapshot:
        """A snapshot that can be resumed here.

        Raises:
            Mismatch: driver, processor or template differ; names the field.
            StoreDamaged: it is not whole.
        """
        snapshot = self.home.store.snapshot(name)
        what = f"snapshot {name}"
        driver = self.driver(snapshot.driver)
        for key, wanted in (("machine", linux.machine()), ("contains", driver.contains)):
            if getattr(snapshot, key) != wanted:
                raise Mismatch(key, getattr(snapshot, key), wanted, what)
        spec = from_dict(Spec, snapshot.spec)
        now = driver.template_hash(spec)
        if snapshot.template_hash != now:
            raise Mismatch(*template.first_difference(snapshot.template_hash, now), what)
        return snapshot

    def saved(self) -> list[dict[str, Any]]:
        """Every snapshot of the folder as a table's row; a damaged one with what is wrong."""
        found: list[dict[str, Any]] = []
        for name in self.home.store.snapshots():
            try:
                snapshot = self.home.store.snapshot(name)
            except SandboxError as error:
                found.append({"id": name, "damaged": str(error)})
                continue
            names = (
                "id",
                "sandbox",
                "driver",
                "contains",
                "entries",
                "bytes",
                "new_bytes",
                "created",
                "parent",
                "processes",
            )
            found.append({key: getattr(snapshot, key) for key in names})
        return sorted(found, key=lambda row: (row.get("created", 0.0), row["id"]))

    def spec(self, snapshot: Snapshot) -> Spec:
        """What the sandbox of a snapshot was made from."""
        return from_dict(Spec, snapshot.spec)

    def resume(self, snapshot: str, *, name: str | None = None) -> Sandbox:
        """A new sandbox from a snapshot, as often as wanted; each gets its own identity and generation.

        Raises:
            Mismatch, StoreDamaged: see `checked`.
        """
        found = self.checked(snapshot)
        return self._make(from_dict(Spec, found.spec), found.driver, name, found)

    def open(self, name: str) -> Sandbox:
        """Take up a paused sandbox of this folder by name or id; it stays paused until `Sandbox.resume`.

        Raises:
            SandboxError: there is none, another process has it, or its owner was killed and it has no snapshot.
        """
        record = self.home.take(name)
        sandbox = Sandbox(self, self.driver(record.driver), from_dict(Spec, record.spec), record)
        sandbox.state, sandbox.generation = State.PAUSED, record.generation
        with self._lock:
            self._live[sandbox.id] = sandbox
        return sandbox

    def shelve(self, snapshot: str, *, name: str | None = None) -> Record:
        """A paused sandbox from a snapshot, without starting anything; `open` and `Sandbox.resume` bring it to life.

        It has a snapshot record of its own, so it outlives the one that it was made from.

        Raises:
            Mismatch, StoreDamaged: see `checked`.
        """
        found = self.checked(snapshot)
        copy = self.home.store.copy(found)
        try:
            record = self.home.new_record(f"sb{randomness.token_hex(6)}", name, found.driver, found.spec)
        except SandboxError:
            self.home.store.delete([copy.id])
            raise
        record.snapshot, record.state = copy.id, State.PAUSED.value
        self.home.save(record)
        self.home.release(record)
        return record

    def remove(self, names: Sequence[str]) -> int:
        """Remove sandboxes that no process has, snapshots and trajectories by name, all or none; returns the bytes freed.

        Raises:
            SandboxError: see `removal.remove`.
        """
        return removal.remove(self, names)

    def _forget(self, sandbox: Sandbox, lost: bool = False) -> None:
        with self._lock:
            self._live.pop(sandbox.id, None)
        chosen = sandbox.snapshot is not None and sandbox.record.name != sandbox.id
        if lost and (chosen or sandbox.record.pooled):
            # Whoever gave it a name or has it from a pool finds it as lost, with the snapshot that is left of it.
            self.home.save(sandbox.record)
            self.home.release(sandbox.record)
        else:
            self.home.forget(sandbox.record)

    def _release(self, sandbox: Sandbox) -> None:
        with self._lock:
            self._live.pop(sandbox.id, None)
        self.home.save(sandbox.record)
        self.home.release(sandbox.record)

    def close(self) -> None:
        """Destroy the sandboxes that live here and end the drivers."""
        for sandbox in list(self._live.values()):
            with contextlib.suppress(SandboxError):
                sandbox.destroy()
        for driver in self._drivers.values():
            driver.close()
        self._drivers.clear()
