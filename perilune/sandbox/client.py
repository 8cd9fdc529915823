"""The core: sandboxes in their states, over a driver and the snapshot store. Blocking calls, safe from several threads.

    with Sandboxes() as sandboxes:
        box = sandboxes.create()
        box.exec(["sh", "-c", "echo hello > /workspace/a"])
        snapshot = box.checkpoint()
        judge, = box.fork(1)

`asynchronous.py` puts the same calls into an event loop.
"""

from __future__ import annotations

import contextlib
import json
import secrets as randomness
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perilune.config.parse import from_dict, to_dict
from perilune.errors import ConfigError, SandboxError
from perilune.sandbox.drivers import driver as make_driver
from perilune.sandbox.drivers.running import Running
from perilune.sandbox.guest import linux
from perilune.sandbox.home import Home, Record
from perilune.sandbox.protocol import (
    TRANSITIONS,
    Capabilities,
    Driver,
    DriverUnavailable,
    GuestFile,
    GuestLost,
    Machine,
    Mismatch,
    OnOutput,
    Output,
    Process,
    Result,
    SecretInSnapshot,
    Spec,
    State,
    TransitionError,
)  # fmt: skip
from perilune.sandbox.store import Snapshot

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "USER": "root",
}
MOST_FORKS = 64
SHORTEST_SECRET = 8
"""Bytes below which a secret is not looked for in files: it would be found everywhere."""


class Execution:
    """A command that runs: iterate over its output, then take `result()`."""

    def __init__(self, sandbox: Sandbox, machine: Machine, process: Process, running: Running) -> None:
        self.sandbox, self.process, self.running = sandbox, process, running
        self._machine, self._begun = machine, time.monotonic()
        self._kills = machine.out_of_memory_kills()
        self._result: Result | None = None
        self._outputs = running.outputs()

    def __iter__(self) -> Iterator[Output]:
        return self._outputs

    def __enter__(self) -> Execution:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def kill(self) -> None:
        """End it and what it started; its result still comes."""
        self.running.kill()

    def close(self) -> None:
        """Leave it; if it still runs it is killed."""
        self.process.close()
        self.sandbox._finished(self)

    def result(self) -> Result:
        """Wait for the end; output not taken before is kept as `Limits.output_bytes` allows.

        Raises:
            GuestLost: the whole guest ended.
        """
        if self._result is None:
            try:
                for _ in self._outputs:
                    pass
                done = self.process.finish()
            except GuestLost:
                self.sandbox._lost(self._machine)
                raise
            finally:
                self.close()
            kept, total, killed = self.running.kept, self.running.total, self._machine.out_of_memory_kills()
            self._result = Result(
                code=int(done["code"]), signal=int(done["signal"]), stdout=bytes(kept["stdout"]), stderr=bytes(kept["stderr"]),
                stdout_bytes=total["stdout"], stderr_bytes=total["stderr"], timed_out=self.running.timed_out,
                out_of_memory=killed > self._kills, seconds=time.monotonic() - self._begun, cpu_seconds=float(done["cpu"]),
                peak_bytes=int(done["rss"]), driver=self.sandbox.driver.name, guarantees=self._machine.guarantees,
            )  # fmt: skip
        return self._result


class Sandbox:
    """One sandbox. Made by `Sandboxes`; see there.

    Attributes:
        id, name: its names; `name` is what the user chose, or the id.
        generation: of its present life; each create, resume and fork gets a new one.
        spec: what it was made from.
        snapshot: the newest snapshot that it was saved as or resumed from, or None.
    """

    def __init__(self, owner: Sandboxes, driver: Driver, spec: Spec, record: Record) -> None:
        self.owner, self.driver, self.spec, self.record = owner, driver, spec, record
        self.id, self.name = record.id, record.name
        self.state = State.CREATING
        self.generation = ""
        self.snapshot: str | None = record.snapshot
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

    def start(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | int = b"",
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        cwd: str = "/workspace",
    ) -> Execution:
        """Start a command and return at once.

        Args:
            argv: program and arguments; no shell.
            stdin: its whole input, or a descriptor whose content is passed on as it comes.
            timeout: seconds until it is killed; None = `Limits.exec_seconds`.
            env: variables over `ENVIRONMENT`.
            secrets: variables that are given to this command only; a checkpoint refuses files that hold one.
            cwd: folder of the guest to start in.

        Raises:
            TransitionError: the sandbox is not running.
            GuestLost: the guest has ended.
        """
        if not argv or any("\0" in part for part in argv):
            raise ConfigError(f"a command needs a program's name, and no NUL in it; given: {list(argv)!r}")
        limits = self.spec.limits
        seconds = limits.exec_seconds if timeout is None else timeout
        with self._lock:
            machine = self._running("exec")
            try:
                process = machine.start(argv, self._variables(env, secrets), cwd)
            except GuestLost:
                self._lost(machine)
                raise
            running = Running(
                process, b"" if isinstance(stdin, int) else stdin, time.monotonic() + seconds, limits.output_bytes,
                source=stdin if isinstance(stdin, int) else -1,
            )  # fmt: skip
            execution = Execution(self, machine, process, running)
            self._executions.add(execution)
            return execution

    def exec(self, argv: Sequence[str], *, on_output: OnOutput | None = None, **options: Any) -> Result:
        """Run a command to its end; `on_output` gets its output as it comes. Options and errors as `start`."""
        execution = self.start(argv, **options)
        try:
            for output in execution:
                if on_output is not None:
                    on_output(output)
        except BaseException:
            execution.close()
            raise
        return execution.result()

    def terminal(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        cwd: str = "/workspace",
    ) -> Process:
        """Start a command on a pseudo-terminal; the caller relays `Process.terminal` and closes the process."""
        machine = self._running("terminal")
        return machine.start(argv, self._variables(env, secrets), cwd, terminal=True)

    def _variables(self, env: Mapping[str, str] | None, secrets: Mapping[str, str] | None) -> dict[str, str]:
        """A command's environment; its secrets are noted, so that no checkpoint saves them."""
        for name, value in [*(env or {}).items(), *(secrets or {}).items()]:
            if not name or "=" in name or "\0" in name + value:
                raise ConfigError(f"variable {name!r} must have a name without '=', and no NUL in name or value")
        for name, value in (secrets or {}).items():
            if len(value.encode()) >= SHORTEST_SECRET:
                self._secrets[name] = value.encode()
        identity = {"PERILUNE_SANDBOX": self.id, "PERILUNE_GENERATION": self.generation}
        return {**ENVIRONMENT, **(env or {}), **(secrets or {}), **identity}

    def _file(self, command: str, data: bytes = b"", **arguments: Any) -> bytes:
        machine = self._running(command)
        try:
            return machine.file_command(command, arguments, data)
        except GuestLost:
            self._lost(machine)
            raise

    def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """Content of a regular file of the guest. Raises GuestFileError; also for one that is longer."""
        return self._file("read", path=path, limit=max_bytes)

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file of the guest whole, its folders with it. Raises GuestFileError."""
        self._file("write", data, path=path, mode=mode)

    def list(self, path: str) -> list[GuestFile]:
        """Entries of a guest's folder, by name. Raises GuestFileError."""
        return [GuestFile(*entry) for entry in json.loads(self._file("list", path=path))]

    def ports(self) -> list[int]:
        """TCP ports that the guest listens on."""
        return json.loads(self._file("listening"))

    def connect(self, port: int) -> socket.socket:
        """A connection to a port of the guest; works without any network between host and guest."""
        machine = self._running("connect")
        try:
            return machine.connect(port)
        except GuestLost:
            self._lost(machine)
            raise

    def checkpoint(self) -> Snapshot:
        """Save the sandbox while it runs on (it stands still meanwhile). Only what the store does not have is written.

        Raises:
            TransitionError: it is not running.
            StoreFull, SecretInSnapshot: nothing was published; the sandbox runs on.
        """
        with self._during(State.SNAPSHOTTING, State.RUNNING) as machine:
            return self._save(machine)

    def _save(self, machine: Machine) -> Snapshot:
        store = self.owner.home.store
        processes = machine.freeze() if not self._frozen else 0
        try:
            # Closing what is left of it lets the guest's agent go on after a failure here.
            with store.writing() as batch, contextlib.closing(machine.capture()) as captured:
                entries, size = [], 0
                for entry, chunks in captured:
                    self._look_for_secrets(entry, chunks)
                    if entry["type"] == "file":
                        entry["chunks"] = [None if chunk is None else batch.put(chunk) for chunk in chunks]
                        size += entry["size"]
                    entries.append(entry)
                snapshot = Snapshot(
                    id=store.new_id(), sandbox=self.id, generation=self.generation, driver=self.driver.name,
                    machine=linux.machine(), contains="files", template_hash=self.driver.template_hash(self.spec),
                    spec=to_dict(self.spec), layer=batch.put(json.dumps(entries).encode()), parent=self.snapshot,
                    created=time.time(), entries=len(entries), bytes=size, new_bytes=batch.new_bytes, processes=processes,
                )  # fmt: skip
                batch.publish(snapshot)
        finally:
            if not self._frozen and machine.alive():
                machine.thaw()
        self.snapshot = snapshot.id
        return snapshot

    def _look_for_secrets(self, entry: Mapping[str, Any], chunks: Sequence[bytes | None]) -> None:
        if not self._secrets:
            return
        longest = max(len(value) for value in self._secrets.values())
        tail = b""
        names = f"{entry['path']}\0{entry.get('to', '')}".encode(errors="surrogateescape")
        for chunk in (names, None, *chunks):
            text = tail + (chunk or b"")
            for name, value in self._secrets.items():
                if value in text:
                    raise SecretInSnapshot(
                        f"sandbox {self.name}: /{entry['path']} holds the secret {name}; nothing was saved. Delete the file, then save again"
                    )
            tail = text[-longest:] if chunk is not None else b""

    def fork(self, count: int = 1) -> list[Sandbox]:
        """Copies of this sandbox as it is now, each with its own identity, generation and secrets; this one runs on.

        Raises:
            TransitionError: it is not running.
        """
        if not 1 <= count <= MOST_FORKS:
            raise ConfigError(f"count={count} must be 1 to {MOST_FORKS} forks at once")
        with self._during(State.FORKING, State.RUNNING) as machine:
            snapshot = self._save(machine)
        made: list[Sandbox] = []
        try:
            for _ in range(count):
                made.append(self.owner.resume(snapshot.id))
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
                self._begin(self.owner.checked(self.snapshot).layer)
            except BaseException as error:
                if isinstance(error, GuestLost) and self._machine is not None:
                    self._lost(self._machine)
                else:
                    self._go(State.PAUSED)
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

    def release(self) -> None:
        """Pause to the store and give it out of this process's hands; `Sandboxes.open` takes it up again, in any process."""
        if self.state is State.RUNNING:
            self.pause()
        if self.state is not State.PAUSED or self._frozen:
            raise TransitionError(self.name, self.state, "release")
        self.owner._release(self)


class Sandboxes:
    """All sandboxes of a folder, as far as this process made or opened them; closing destroys those that live.

    Args:
        folder: where records, snapshots and templates lie; None = `home.default_folder()`.
        sync: how snapshots are written (`store.SYNCS`).
        max_bytes: most bytes of stored blobs.
    """

    def __init__(self, folder: Path | None = None, *, sync: str = "batch", max_bytes: int = 64 << 30) -> None:
        self.home = Home(folder, sync=sync, max_bytes=max_bytes)
        self._drivers: dict[str, Driver] = {}
        self._probes: dict[str, Any] = {}
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

    def probe(self, name: str) -> Any:
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
        for key, wanted in (("machine", linux.machine()), ("contains", "files")):
            if getattr(snapshot, key) != wanted:
                raise Mismatch(key, getattr(snapshot, key), wanted, what)
        spec = from_dict(Spec, snapshot.spec)
        now = self.driver(snapshot.driver).template_hash(spec)
        if snapshot.template_hash != now:
            raise Mismatch("template_hash", snapshot.template_hash, now, what)
        return snapshot

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

    def _forget(self, sandbox: Sandbox, lost: bool = False) -> None:
        with self._lock:
            self._live.pop(sandbox.id, None)
        if lost and sandbox.snapshot is not None and sandbox.record.name != sandbox.id:
            # Whoever gave it a name finds it as lost, with the snapshot that is left of it.
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
