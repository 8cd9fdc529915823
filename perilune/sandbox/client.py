"""One sandbox in its states, over a driver's machine and the snapshot store. Blocking calls, safe from several threads.

`sandboxes.py` makes them; `asynchronous.py` puts the same calls into an event loop.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from perilune.config.parse import to_dict
from perilune.errors import ConfigError, SandboxError
from perilune.sandbox.execution import Execution
from perilune.sandbox.guest import linux
from perilune.sandbox.guest_calls import GuestCalls
from perilune.sandbox.home import Record
from perilune.sandbox.memory import Memory, measured
from perilune.sandbox.protocol import (
    TRANSITIONS,
    Capabilities,
    Driver,
    DriverUnavailable,
    GuestLost,
    Machine,
    SecretInSnapshot,
    Spec,
    State,
    TransitionError,
)
from perilune.sandbox.store import Snapshot

if TYPE_CHECKING:
    from perilune.sandbox.sandboxes import Sandboxes

MOST_FORKS = 64


class Sandbox(GuestCalls):
    """One sandbox. Made by `Sandboxes`; see there.

    Attributes:
        id, name: its names; `name` is what the user chose, or the id.
        generation: of its present life; each create, resume and fork gets a new one.
        spec: what it was made from.
        snapshot: the newest snapshot that it was saved as or resumed from, or None.
        used: `time.monotonic()` of its last use: a command's start or end, a file, a port.
    """

    def __init__(self, owner: Sandboxes, driver: Driver, spec: Spec, record: Record) -> None:
        self.owner, self.driver, self.spec, self.record = owner, driver, spec, record
        self.id, self.name = record.id, record.name
        self.state = State.CREATING
        self.generation = ""
        self.snapshot: str | None = record.snapshot
        self.used = time.monotonic()
        self._machine: Machine | None = None
        self._frozen = False
        self._secrets: dict[str, bytes] = {}
        self._executions: set[Execution] = set()
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"Sandbox({self.name!r}, {self.driver.name}, {self.state.value})"

    def _go(self, state: State) -> None:
        with self._lock:
            if state not in TRANSITIONS[self.state]:
                raise TransitionError(self.name, self.state, state)
            self.state = state
            self.record.state = state.value
            self.record.snapshot = self.snapshot

    @contextlib.contextmanager
    def _during(self, state: State, after: State) -> Iterator[Machine]:
        """A transitional state; a failure leads back to where it came from, a lost guest to the end."""
        with self._lock:
            before, machine = self.state, self._machine
            self._go(state)
        try:
            assert machine is not None, "a sandbox in this state has a machine"
            yield machine
        except BaseException as error:
            if isinstance(error, GuestLost) and machine is not None:
                self._lost(machine)
            elif self.state is state:
                self._go(before)
            raise
        if self.state is state:
            self._go(after)

    def _running(self, call: str) -> Machine:
        with self._lock:
            if self.state is not State.RUNNING or self._machine is None:
                raise TransitionError(self.name, self.state, call)
            self.used = time.monotonic()
            return self._machine

    def _lost(self, machine: Machine) -> None:
        """The machine has ended. What an earlier life of this sandbox left behind says nothing of the present one."""
        with self._lock:
            if self.state in (State.KILLING, State.DEAD) or machine is not self._machine:
                return
            self._go(State.KILLING)
            self._end_machine()
            self._go(State.DEAD)
        self.owner._forget(self, lost=True)

    def _finished(self, execution: Execution) -> None:
        with self._lock:
            self._executions.discard(execution)
            self.used = time.monotonic()

    @property
    def busy(self) -> int:
        """Commands that run now and that somebody waits for."""
        return len(self._executions)

    @property
    def held(self) -> bool:
        """Whether it has a machine: it runs, or is paused in memory."""
        return self._machine is not None

    def alive(self) -> bool:
        """Whether its guest still lives; False also for one without a machine."""
        with self._lock:
            return self._machine is not None and self._machine.alive()

    def lost(self) -> None:
        """Clear away what is left of a guest that has ended; does nothing while it lives."""
        with self._lock:
            machine = self._machine
        if machine is not None and not machine.alive():
            self._lost(machine)

    def unsaved_processes(self) -> int:
        """How many processes a pause to the store would lose; 0 for a driver that saves the whole machine."""
        with self._lock:
            return self._machine.unsaved_processes() if self._machine is not None else 0

    def memory(self) -> Memory:
        """What it holds now; zeros while it is paused to its snapshot."""
        with self._lock:
            machine = self._machine
        return measured(machine.pids(), machine.file_bytes()) if machine is not None else Memory()

    def _end_machine(self) -> None:
        machine, self._machine, self._frozen = self._machine, None, False
        if machine is not None:
            machine.destroy()

    def _begin(self, layer: str | None) -> None:
        """Start a machine in a new generation; the state is CREATING or RESUMING."""
        self.generation = uuid.uuid4().hex
        self._secrets.clear()
        blobs = str(self.owner.home.store.root / "blobs")
        self._machine = self.driver.make(self.id, self.generation, self.spec, layer, blobs)
        self.record.generation = self.generation
        self._go(State.RUNNING)

    def capabilities(self) -> Capabilities:
        """What the driver can do here, as its probe found."""
        probe = self.owner.probe(self.driver.name)
        if probe.capabilities is None:
            raise DriverUnavailable(f"{probe.driver}: {probe.reason}")
        return probe.capabilities

    def checkpoint(self) -> Snapshot:
        """Save the sandbox while it runs on (it stands still meanwhile). Only what the store does not have is written.

        Raises:
            TransitionError: it is not running.
            StoreFull, SecretInSnapshot: nothing was published; the sandbox runs on.
        """
        with self._during(State.SNAPSHOTTING, State.RUNNING) as machine:
            snapshot = self._save(machine)
        self._write_down()
        return snapshot

    def _save(self, machine: Machine) -> Snapshot:
        store = self.owner.home.store
        processes = machine.freeze() if not self._frozen else 0
        try:
            with store.writing() as batch:
                saved = machine.save(batch, self._look_for_secrets)
                snapshot = Snapshot(
                    id=store.new_id(), sandbox=self.id, generation=self.generation, driver=self.driver.name,
                    machine=linux.machine(), contains=self.driver.contains, spec=to_dict(self.spec),
                    template_hash=self.driver.template_hash(self.spec), layer=saved.layer, parent=self.snapshot,
                    created=time.time(), entries=saved.entries, bytes=saved.bytes, new_bytes=batch.new_bytes,
                    processes=processes,
                )  # fmt: skip
                batch.publish(snapshot)
        finally:
            if not self._frozen and machine.alive():
                machine.thaw()
        self.snapshot = self.record.snapshot = snapshot.id
        return snapshot

    def _write_down(self) -> None:
        """Have the folder know the present state, whatever happens to this process."""
        self.record.state = self.state.value
        self.owner.home.save(self.record)

    def _look_for_secrets(self, where: str, pieces: Iterable[bytes | None]) -> None:
        if not self._secrets:
            return
        longest = max(len(value) for value in self._secrets.values())
        tail = b""
        for piece in pieces:
            text = tail + (piece or b"")
            for name, value in self._secrets.items():
                if value in text:
                    raise SecretInSnapshot(
                        f"sandbox {self.name}: {where} holds the secret {name}; nothing was saved. Remove it there, then save again"
                    )
            tail = text[-longest:] if piece is not None else b""

    def fork(self, count: int = 1, *, name: str | None = None) -> list[Sandbox]:
        """Copies of this sandbox as it is now, each with its own identity, generation and secrets; this one runs on.

        Args:
            name: the copies are called NAME-1, NAME-2, …, as far as these are free; None = by their ids.

        Raises:
            TransitionError: it is not running.
        """
        if not 1 <= count <= MOST_FORKS:
            raise ConfigError(f"count={count} must be 1 to {MOST_FORKS} forks at once")
        with self._during(State.FORKING, State.RUNNING) as machine:
            snapshot = self._save(machine)
        names = [None] * count if name is None else self.owner.home.free_names(name, count)
        made: list[Sandbox] = []
        try:
            for one in names:
                made.append(self.owner.resume(snapshot.id, name=one))
        except BaseException:
            for sandbox in made:
                sandbox.destroy()
            raise
        return made

    def pause(self, *, keep_memory: bool = False) -> Snapshot | None:
        """Stop the sandbox. With `keep_memory` its processes wait in memory; else it is saved and holds no memory and no process.

        A driver whose snapshots hold files loses the processes then; the snapshot's `processes` says how many there were.

        Raises:
            TransitionError: it is not running.
        """
        with self._during(State.PAUSING, State.PAUSED) as machine:
            if keep_memory:
                machine.freeze()
                self._frozen = True
                return None
            snapshot = self._save(machine)
            self._end_machine()
        self._write_down()
        return snapshot

    def resume(self) -> None:
        """Go on after `pause`: in memory as it stood, or from its snapshot in a new generation.

        Raises:
            TransitionError: it is not paused.
            Mismatch, StoreDamaged: the snapshot cannot be resumed here; the sandbox stays paused.
        """
        with self._lock:
            self._go(State.RESUMING)
            try:
                if self._frozen:
                    assert self._machine is not None, "a frozen sandbox has a machine"
                    self._machine.thaw()
                    self._frozen = False
                    self._go(State.RUNNING)
                    return
                assert self.snapshot is not None, "a paused sandbox without a machine has a snapshot"
                layer = self.owner.checked(self.snapshot).layer
                # Before anything can run that its snapshot does not know of.
                self._write_down()
                self._begin(layer)
            except BaseException as error:
                if isinstance(error, GuestLost) and self._machine is not None:
                    self._lost(self._machine)
                else:
                    self._go(State.PAUSED)
                    if not self._frozen:
                        self._write_down()
                raise

    def destroy(self) -> None:
        """End it for good: all its processes, memory and control groups. Its snapshots stay. A second call does nothing."""
        with self._lock:
            if self.state is State.DEAD:
                return
            self._go(State.KILLING)
            self._end_machine()
            self._go(State.DEAD)
        self.owner._forget(self)

    def revert(self) -> None:
        """Give up what changed since the newest snapshot and be paused at it.

        Raises:
            TransitionError: it is not running.
            SandboxError: it has no snapshot.
        """
        if self.snapshot is None:
            raise SandboxError(f"sandbox {self.name} has no snapshot to go back to")
        with self._during(State.PAUSING, State.PAUSED):
            self._end_machine()
        self._write_down()

    def release(self) -> None:
        """Pause to the store and give it out of this process's hands; `Sandboxes.open` takes it up again, in any process."""
        if self.state is State.RUNNING:
            self.pause()
        if self.state is not State.PAUSED or self._frozen:
            raise TransitionError(self.name, self.state, "release")
        self.owner._release(self)
