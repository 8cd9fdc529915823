"""The pool: sandboxes by name for many users of one process.

    create ─ use (resumes what was parked) ─ fork, pause, resume, checkpoint ─ destroy
    reaper (`reaper.py`): measures memory, parks the idle, removes the expired, saves for recovery, keeps some warm

A pool that is closed releases its sandboxes: they lie paused in the folder, and the next pool on it finds them. So does the pool
after one that was killed; what ran then is listed as lost with its last snapshot.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from perilune.errors import SandboxError
from perilune.sandbox.client import Sandbox
from perilune.sandbox.home import DAMAGED, LOST, Record
from perilune.sandbox.memory import Memory
from perilune.sandbox.pool.admission import Admission
from perilune.sandbox.pool.limits import PoolLimits, Usage, Warm
from perilune.sandbox.pool.reaper import Reaper
from perilune.sandbox.protocol import GuestLost, Spec, State
from perilune.sandbox.sandboxes import Sandboxes
from perilune.sandbox.store import Snapshot


@dataclass(slots=True, eq=False)
class Entry:
    """A sandbox of this pool; `lock` is held while it changes state, `users` counts those in between."""

    sandbox: Sandbox
    lock: threading.RLock = field(default_factory=threading.RLock)
    users: int = 0
    memory: Memory = field(default_factory=Memory)
    saved: float = 0.0

    @property
    def idle_seconds(self) -> float:
        """Since its last use; 0 while it is in use."""
        return 0.0 if self.users or self.sandbox.busy else time.monotonic() - self.sandbox.used


class Pool:
    """Sandboxes of one folder, admitted by memory.

    Args:
        sandboxes: where they live; the pool closes it.
        limits: see `PoolLimits`.
        warm: kinds of which some are kept ready.
    """

    def __init__(self, sandboxes: Sandboxes, limits: PoolLimits | None = None, warm: Sequence[Warm] = ()) -> None:
        self.sandboxes, self.home = sandboxes, sandboxes.home
        self.limits = limits or PoolLimits()
        self.entries: dict[str, Entry] = {}
        self.warm: dict[Warm, list[Sandbox]] = {kind: [] for kind in warm}
        self.admission = Admission(self.limits, self._holding, self._make_room)
        self.changed = self.admission.changed
        self._closed = False
        self.reaper = Reaper(self)
        self.reaper.begin()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _holding(self) -> list[Sandbox]:
        waiting = [sandbox for kept in self.warm.values() for sandbox in kept]
        return [*waiting, *(entry.sandbox for entry in self.entries.values() if entry.sandbox.held)]

    def _make_room(self) -> bool:
        """Park the one that has been idle longest; False if there is none."""
        with self.changed:
            entries = sorted(self.entries.values(), key=lambda entry: entry.sandbox.used)
        return any(self.park(entry, self.limits.park_seconds) for entry in entries)

    def park(self, entry: Entry, idle_seconds: float) -> bool:
        """Pause a sandbox to the store if nobody has used it for that long and nothing is lost by it."""
        sandbox = entry.sandbox
        if entry.idle_seconds < idle_seconds or not entry.lock.acquire(blocking=False):
            return False
        try:
            if sandbox.state is not State.RUNNING or entry.idle_seconds < idle_seconds or sandbox.unsaved_processes():
                return False
            sandbox.record.parked = True
            try:
                self.own_snapshot(entry, pause=True)
            except SandboxError:
                sandbox.record.parked = False
                # Not tried again before its next use: a file may hold a secret, or the store be full.
                sandbox.used = time.monotonic()
                return False
            return True
        finally:
            entry.lock.release()
            with self.changed:
                self.changed.notify_all()

    def own_snapshot(self, entry: Entry, *, pause: bool) -> None:
        """Save a sandbox for the pool's own purposes; the one before is dropped."""
        record = entry.sandbox.record
        if record.own_snapshot is not None:
            # Said first, so that a kill forgets none; it goes only when it is nobody's newest any more.
            self.reaper.drop(record.own_snapshot)
        snapshot = entry.sandbox.pause() if pause else entry.sandbox.checkpoint()
        assert snapshot is not None, "a pause to the store makes a snapshot"
        entry.saved = time.monotonic()
        record.own_snapshot = snapshot.id
        self.home.save(record)

    # Sandboxes

    def create(
        self, spec: Spec | None = None, *, driver: str = "proc", name: str | None = None,
        lifetime_seconds: float | None = None, idle_seconds: float | None = None,
    ) -> Sandbox:  # fmt: skip
        """A new sandbox, running; from those kept warm if one is of this kind.

        Args:
            lifetime_seconds, idle_seconds: its own, see `PoolLimits`; 0 = never.

        Raises:
            CapacityError: see `Admission.admitted`.
            DriverUnavailable, SandboxError: see `Sandboxes.create`.
        """
        spec = spec or Spec()
        sandbox = self._take_warm(driver, spec, name)
        if sandbox is None:
            with self.admission.admitted(driver, spec):
                sandbox = self.sandboxes.create(spec, driver=driver, name=name)
                return self._enter(sandbox, lifetime_seconds, idle_seconds).sandbox
        return self._enter(sandbox, lifetime_seconds, idle_seconds).sandbox

    def _take_warm(self, driver: str, spec: Spec, name: str | None) -> Sandbox | None:
        with self.changed:
            for kind, kept in self.warm.items():
                while (kind.driver, kind.spec) == (driver, spec) and kept:
                    sandbox = kept.pop()
                    try:
                        if not sandbox.alive():
                            sandbox.destroy()
                            continue
                        if name is not None:
                            self.home.rename(sandbox.record, name)
                            sandbox.name = name
                    except BaseException:
                        kept.append(sandbox)
                        raise
                    self.reaper.wake()
                    return sandbox
        return None

    def resume_snapshot(self, snapshot: str, *, name: str | None = None, **times: float | None) -> Sandbox:
        """A new sandbox from a snapshot. Raises as `Sandboxes.resume` and `Admission.admitted`."""
        found = self.sandboxes.checked(snapshot)
        with self.admission.admitted(found.driver, self.sandboxes.spec(found)):
            sandbox = self.sandboxes.resume(snapshot, name=name)
            return self._enter(sandbox, times.get("lifetime_seconds"), times.get("idle_seconds")).sandbox

    def _enter(self, sandbox: Sandbox, lifetime: float | None, idle: float | None) -> Entry:
        record = sandbox.record
        lifetime = self.limits.lifetime_seconds if lifetime is None else lifetime
        record.pooled, record.idle_seconds = True, self.limits.idle_seconds if idle is None else idle
        record.ends = time.time() + lifetime if lifetime else 0.0
        self.home.save(record)
        entry = Entry(sandbox)
        sandbox.used = entry.saved = time.monotonic()
        with self.changed:
            self.entries[sandbox.id] = entry
        return entry

    def entry(self, name: str) -> Entry:
        """The pool's entry for a sandbox by name or id; one that lies paused in the folder is taken up.

        Raises:
            SandboxError: there is none, it is lost, or another process has it.
        """
        with self.changed:
            for entry in self.entries.values():
                if name in (entry.sandbox.id, entry.sandbox.name):
                    if entry.sandbox.state is State.DEAD:
                        self.entries.pop(entry.sandbox.id, None)
                        break
                    return entry
            sandbox = self.sandboxes.open(name)
            if sandbox.record.parked:
                # Whoever parked it may have been killed before this was written down.
                sandbox.record.own_snapshot = sandbox.snapshot
            self.entries[sandbox.id] = entry = Entry(sandbox)
            return entry

    @contextlib.contextmanager
    def use(self, name: str, *, wake: bool = True) -> Iterator[Sandbox]:
        """A sandbox that is not parked meanwhile; one that was is resumed first unless `wake` is False.

        Raises:
            SandboxError, CapacityError: see `entry` and `Admission.admitted`.
        """
        entry = self.entry(name)
        with entry.lock:
            if wake and entry.sandbox.record.parked and entry.sandbox.state is State.PAUSED:
                self._resume(entry)
            entry.users += 1
        try:
            yield entry.sandbox
        except GuestLost:
            if entry.sandbox.state is State.DEAD:
                with self.changed:
                    self.entries.pop(entry.sandbox.id, None)
            raise
        finally:
            entry.users -= 1
            entry.sandbox.record.used = time.time()
            with self.changed:
                self.changed.notify_all()

    def _resume(self, entry: Entry) -> None:
        sandbox = entry.sandbox
        if sandbox.held:
            return sandbox.resume()
        with self.admission.admitted(sandbox.driver.name, sandbox.spec):
            sandbox.resume()
        sandbox.record.parked = False
        sandbox.used = entry.saved = time.monotonic()

    def resume(self, name: str) -> Sandbox:
        """Go on with a paused or parked sandbox. Raises as `Sandbox.resume` and `Admission.admitted`."""
        entry = self.entry(name)
        with entry.lock:
            self._resume(entry)
        return entry.sandbox

    def pause(self, name: str, *, keep_memory: bool = False) -> Snapshot | None:
        """See `Sandbox.pause`; it stays paused until `resume`. A parked one becomes paused."""
        entry = self.entry(name)
        with entry.lock:
            if entry.sandbox.record.parked and entry.sandbox.state is State.PAUSED:
                entry.sandbox.record.parked = False
                entry.sandbox.record.own_snapshot = None  # From here on it is its owner's.
                self.home.save(entry.sandbox.record)
                assert entry.sandbox.snapshot is not None, "a parked sandbox has a snapshot"
                return self.home.store.snapshot(entry.sandbox.snapshot)
            return entry.sandbox.pause(keep_memory=keep_memory)

    def fork(self, name: str, count: int = 1, *, prefix: str | None = None) -> list[Sandbox]:
        """Copies, each in the pool with the times of the original. Raises as `Sandbox.fork` and `Admission.admitted`.

        Args:
            prefix: of their names; see `Sandbox.fork`.
        """
        with self.use(name) as sandbox, self.admission.admitted(sandbox.driver.name, sandbox.spec, count):
            before = sandbox.record
            left = max(1.0, before.ends - time.time()) if before.ends else 0.0
            made = sandbox.fork(count, name=prefix)
            if before.own_snapshot is not None:
                self.reaper.drop(before.own_snapshot)
            before.own_snapshot = sandbox.snapshot  # Nobody was told of it.
            self.home.save(before)
            return [self._enter(one, left, before.idle_seconds).sandbox for one in made]

    def destroy(self, name: str) -> None:
        """End a sandbox for good, or strike a lost or damaged one off the list. Raises SandboxError if there is none."""
        record = self.home.find(name)
        if record.state in (LOST, DAMAGED):
            self.home.remove(record.id)
        else:
            entry = self.entry(name)
            with entry.lock:
                record = entry.sandbox.record
                entry.sandbox.destroy()
        with self.changed:
            self.entries.pop(record.id, None)
            self.changed.notify_all()
        if record.own_snapshot is not None:
            self.reaper.drop(record.own_snapshot)

    def records(self) -> list[dict[str, Any]]:
        """Every sandbox of the folder: its record and, where it is held here, its memory and how long nobody has used it."""
        with self.changed:
            entries = dict(self.entries)
            waiting = {sandbox.id for kept in self.warm.values() for sandbox in kept}
        found = []
        for record in self.home.records():
            entry = entries.get(record.id)
            shown = self._shown(record, entry)
            found.append(shown | ({"state": "warm"} if record.id in waiting else {}))
        return found

    def _shown(self, record: Record, entry: Entry | None) -> dict[str, Any]:
        names = ("id", "name", "driver", "snapshot", "created", "ends", "generation", "pid")
        state = record.state if entry is None else entry.sandbox.state.value
        held = entry is not None and entry.sandbox.held
        return {name: getattr(record, name) for name in names} | {
            "state": "parked" if state == "paused" and record.parked else state,
            "promised_bytes": record.spec.get("limits", {}).get("memory_bytes", 0) if held else 0,
            "memory_bytes": entry.memory.total if entry is not None and held else 0,
            "idle_seconds": round(entry.idle_seconds, 1) if entry is not None and held else 0.0,
            "commands": entry.sandbox.busy if entry is not None else 0,
        }

    def usage(self) -> Usage:
        """What the pool holds; memory as of the reaper's last look."""
        with self.changed:
            holding = self._holding()
            paused = sum(not entry.sandbox.held for entry in self.entries.values())
            warm = sum(map(len, self.warm.values()))
        return Usage(
            held=len(holding), paused=paused, warm=warm, memory=self.admission.memory, allowed_bytes=self.limits.memory_bytes,
            promised_bytes=sum(sandbox.spec.limits.memory_bytes for sandbox in holding),
            store_bytes=self.home.store.used_bytes(),
        )  # fmt: skip

    def close(self) -> None:
        """End the reaper, pause every sandbox to the store, end those kept warm. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.reaper.end()
        for kept in self.warm.values():
            while kept:
                kept.pop().destroy()
        for entry in list(self.entries.values()):
            with entry.lock, contextlib.suppress(SandboxError):
                self._release(entry.sandbox)
        self.entries.clear()
        self.sandboxes.close()

    def _release(self, sandbox: Sandbox) -> None:
        if sandbox.state is State.DEAD:
            return
        # What is running now shall run again at its next use; what its owner paused stays paused.
        sandbox.record.parked = sandbox.record.parked or sandbox.state is State.RUNNING
        if sandbox.state is State.PAUSED and sandbox.held:
            sandbox.resume()
        sandbox.release()
