"""The pool's clock: one thread that measures, parks, removes, saves and keeps warm."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from perilune.errors import CapacityError, SandboxError
from perilune.sandbox.home import LOST
from perilune.sandbox.memory import Memory
from perilune.sandbox.protocol import State

if TYPE_CHECKING:
    from perilune.sandbox.pool.pool import Entry, Pool

log = logging.getLogger(__name__)
COLLECT_SECONDS = 20.0
"""Between two collections of dropped snapshots: each reads the lists of all snapshots."""
FOLDER_SECONDS = 30.0
"""Between two looks for what killed processes left in the folder."""


class Reaper:
    """See the module; `tick` does all that is due now."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.unwanted = pool.home.folder / "unwanted"
        """Snapshots to delete, one empty file each, so that a killed pool forgets none."""
        self._collected = self._looked = 0.0
        self._ticking = threading.Lock()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="sandbox-reaper", daemon=True)

    def begin(self) -> None:
        """Clean up after killed processes, then start the thread."""
        self.unwanted.mkdir(exist_ok=True)
        self.pool.home.reap()
        self._looked = time.monotonic()
        self._thread.start()

    def end(self) -> None:
        """Stop the thread and wait for it; dropped snapshots are deleted."""
        self._stop.set()
        self._wake.set()
        self._thread.join()
        self._collect()

    def wake(self) -> None:
        """Have it look now."""
        self._wake.set()

    def drop(self, snapshot: str) -> None:
        """A snapshot of the pool's own; it goes once it is no sandbox's newest one."""
        with contextlib.suppress(OSError):
            (self.unwanted / snapshot).touch()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.tick()
            except Exception:
                log.exception("sandbox pool: the reaper goes on after an error")
            self._wake.wait(self.pool.limits.tick_seconds)
            self._wake.clear()

    def tick(self) -> None:
        """One look at everything; one at a time."""
        with self._ticking:
            self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        with self.pool.changed:
            entries = list(self.pool.entries.values())
        for entry in entries:
            self._look(entry)
        self._measure()
        self._keep_warm()
        if now - self._collected > COLLECT_SECONDS:
            self._collect()
            self._collected = now
        if now - self._looked > FOLDER_SECONDS:
            self._look_at_folder()
            self._looked = now

    def _look(self, entry: Entry) -> None:
        sandbox, pool = entry.sandbox, self.pool
        if sandbox.state is State.DEAD or (sandbox.held and not sandbox.alive()):
            # A dead one is lost at its next use, or now: its machine must be cleared away.
            with entry.lock:
                sandbox.lost()
            with pool.changed:
                pool.entries.pop(sandbox.id, None)
                pool.changed.notify_all()
            return
        record = sandbox.record
        if record.ends and record.ends < time.time():
            with contextlib.suppress(SandboxError):
                pool.destroy(sandbox.id)
            return
        if record.idle_seconds and entry.idle_seconds > record.idle_seconds:
            pool.park(entry, record.idle_seconds)
        every = pool.limits.snapshot_seconds
        if (
            every
            and sandbox.state is State.RUNNING
            and sandbox.used > entry.saved
            and time.monotonic() - entry.saved > every
        ):
            self._save(entry)

    def _save(self, entry: Entry) -> None:
        if entry.lock.acquire(blocking=False):
            try:
                self.pool.own_snapshot(entry, pause=False)
            except SandboxError as error:
                log.warning("no recovery snapshot: %s", error)
                entry.saved = time.monotonic()
            finally:
                entry.lock.release()

    def _measure(self) -> None:
        total, seen = Memory(), []
        with self.pool.changed:
            entries = list(self.pool.entries.values())
            waiting = [sandbox for kept in self.pool.warm.values() for sandbox in kept]
        for entry in entries:
            if entry.sandbox.held:
                entry.memory = entry.sandbox.memory()
                self.pool.admission.learn(entry.sandbox.driver.name, entry.sandbox.spec, entry.memory.total)
                total += entry.memory
                seen.append(entry.sandbox.id)
        for sandbox in waiting:
            total += sandbox.memory()
            seen.append(sandbox.id)
        self.pool.admission.note(total, frozenset(seen))

    def _keep_warm(self) -> None:
        for kind, kept in self.pool.warm.items():
            while len(kept) < kind.count and not self._stop.is_set():
                try:
                    if self.pool.admission.refuses(kind.driver, kind.spec):
                        return
                    with self.pool.admission.admitted(kind.driver, kind.spec):
                        sandbox = self.pool.sandboxes.create(kind.spec, driver=kind.driver)
                        with self.pool.changed:
                            kept.append(sandbox)
                except (SandboxError, CapacityError) as error:
                    log.warning("no warm sandbox of driver %s: %s", kind.driver, error)
                    return

    def _collect(self) -> None:
        store = self.pool.home.store
        needed = {record.snapshot for record in self.pool.home.records()}
        names = [path.name for path in self.unwanted.iterdir() if path.name not in needed]
        if not names:
            return
        try:
            store.delete([name for name in names if store.snapshot_path(name).exists()])
        except SandboxError as error:
            log.warning("dropped snapshots stay: %s", error)
            return
        for name in names:
            (self.unwanted / name).unlink(missing_ok=True)

    def _look_at_folder(self) -> None:
        """Paused sandboxes that nobody has taken up also end, and lost ones leave the list at last."""
        home, now = self.pool.home, time.time()
        home.reap()
        for record in home.records():
            old = record.state == LOST and record.pooled and record.used + self.pool.limits.lost_seconds < now
            over = record.state == State.PAUSED.value and record.ends and record.ends < now
            if (old or over) and not home.is_live(record.id):
                with contextlib.suppress(SandboxError):
                    home.remove(record.id)
                    for snapshot in {record.own_snapshot, record.snapshot if record.parked else None} - {None}:
                        self.drop(str(snapshot))
