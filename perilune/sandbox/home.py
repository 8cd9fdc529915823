"""The folder that holds sandboxes between commands: records, locks, snapshots, drivers' files.

    sandboxes/ID.json    what a sandbox is, its state and its newest snapshot
    sandboxes/ID.lock    locked by the process that has it live; the kernel frees it when that process ends in any way
    store/               snapshots, see `store/store.py`
    trajectories/NAME/   steps of an agent's trajectory, see `manifest.py`
    proc/                templates and mount point of the `proc` driver

A record whose state is not paused and whose lock is free belonged to a process that was killed: that sandbox is lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perilune.errors import ConfigError, SandboxError
from perilune.sandbox.drivers import cgroup
from perilune.sandbox.drivers.proc_machine import remove_scratch
from perilune.sandbox.protocol import GuestLost, NoSuchSandbox, State, StoreDamaged
from perilune.sandbox.store import Store

FOLDER_VARIABLE = "PERILUNE_SANDBOX_HOME"
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")
LOST = "lost"
DAMAGED = "damaged"
"""State of a record that cannot be read; its sandbox is known by its id alone."""


def default_folder() -> Path:
    """Where sandboxes are kept: $PERILUNE_SANDBOX_HOME, else perilune/sandbox under the user's state folder."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen)
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local/state") / "perilune/sandbox"


@dataclass(kw_only=True)
class Record:
    """A sandbox as the folder knows it; `lock` is the descriptor of the locked file where this process has it.

    Attributes:
        created, used: seconds since 1970.
        ends: when a pool removes it; 0 = never.
        idle_seconds: of no use after which a pool parks it; 0 = never.
        pooled: a pool made it; as a lost one it stays listed.
        parked: a pool paused it for want of use, and resumes it at the next one.
        own_snapshot: made by a pool for itself; dropped once there is a newer one.
    """

    id: str
    name: str
    driver: str
    spec: dict[str, Any]
    state: str
    snapshot: str | None = None
    generation: str = ""
    created: float = 0.0
    pid: int = 0
    used: float = 0.0
    ends: float = 0.0
    idle_seconds: float = 0.0
    pooled: bool = False
    parked: bool = False
    own_snapshot: str | None = None
    lock: int = field(default=-1, compare=False)


class Home:
    """Records and store of one folder.

    Args:
        folder: None = `default_folder()`.
        sync, max_bytes: of the store.
    """

    def __init__(self, folder: str | Path | None = None, *, sync: str = "batch", max_bytes: int = 64 << 30) -> None:
        if max_bytes <= 0:
            raise ConfigError(f"a store of {max_bytes} bytes holds nothing; give it more")
        self.folder = (default_folder() if folder is None else Path(folder)).resolve()
        try:
            self.records_folder = self.folder / "sandboxes"
            self.trajectories_folder = self.folder / "trajectories"
            self.records_folder.mkdir(parents=True, exist_ok=True)
            os.chmod(self.folder, 0o700)
            self.store = Store(self.folder / "store", sync=sync, max_bytes=max_bytes)
        except OSError as error:
            raise ConfigError(
                f"sandboxes cannot be kept in {self.folder}: {error.strerror}; set {FOLDER_VARIABLE} to a folder of yours"
            ) from error

    def _lock(self, name: str, patience: float = 0.2) -> int:
        """Descriptor of the locked file of sandbox `name`, or -1 if another process has it.

        Args:
            patience: seconds to try again, for one who only looks whether it is locked holds it for a moment.
        """
        path = self.records_folder / f"{name}.lock"
        deadline = time.monotonic() + patience
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd
            except BlockingIOError:
                os.close(fd)
                if time.monotonic() >= deadline:
                    return -1
                time.sleep(0.01)
                continue
            except FileNotFoundError:
                pass
            os.close(fd)  # Its file was removed between the two calls: again.

    def is_live(self, name: str) -> bool:
        """Whether some process has the sandbox with this id."""
        if not (self.records_folder / f"{name}.lock").exists():
            return False
        fd = self._lock(name, patience=0)
        if fd >= 0:
            os.close(fd)
        return fd < 0

    def new_record(self, id: str, name: str | None, driver: str, spec: dict[str, Any]) -> Record:
        """A record for a sandbox of this process, locked and written before anything of the sandbox exists.

        Raises:
            ConfigError: a name that cannot be one.
            SandboxError: the name is taken.
        """
        with self._naming():
            if name is not None:
                self._check_name(name)
            record = Record(id=id, name=name or id, driver=driver, spec=spec, state=State.CREATING.value)
            record.created = record.used = time.time()
            record.pid, record.lock = os.getpid(), self._lock(id)
            self.save(record)
        return record

    def rename(self, record: Record, name: str) -> None:
        """Give a record of this process another name. Raises ConfigError and SandboxError as `new_record`."""
        with self._naming():
            self._check_name(name)
            record.name = name
            self.save(record)

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name) or name.startswith("snap-"):
            raise ConfigError(
                f"name {name!r} must be letters, digits, '.', '_', '-' (at most 63), and not start with snap-"
            )
        if any(name in (record.name, record.id) for record in self.records()):
            raise SandboxError(
                f"there is a sandbox {name!r} already; remove it (perilune sandbox rm {name}) or take another name"
            )

    def free_names(self, prefix: str, count: int) -> list[str]:
        """The next names PREFIX-1, PREFIX-2, … that no sandbox has now."""
        taken = {record.name for record in self.records()}
        numbered = (f"{prefix}-{number}" for number in itertools.count(1))
        return list(itertools.islice((name for name in numbered if name not in taken), count))

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """One at a time, over all processes, looks whether a name is free and takes it."""
        fd = os.open(self.folder / "names", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def save(self, record: Record) -> None:
        """Write a record whole. A paused sandbox is nowhere else: its record reaches the disk as its snapshot does."""
        values = asdict(record)
        del values["lock"]
        temporary = self.records_folder / f"{record.id}.{os.getpid()}.{threading.get_ident()}.tmp"
        lasting = record.state == State.PAUSED.value and self.store.sync != "none"
        try:
            with open(temporary, "w") as file:
                file.write(json.dumps(values))
                file.flush()
                if lasting:
                    os.fsync(file.fileno())
            os.replace(temporary, self.records_folder / f"{record.id}.json")
            if lasting:
                sync_folder(self.records_folder)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise SandboxError(
                f"cannot write the record of sandbox {record.name} in {self.records_folder}: {error.strerror}; free some "
                f"space there, or set {FOLDER_VARIABLE} to another folder"
            ) from error

    def release(self, record: Record) -> None:
        """Give the lock back; the record stays."""
        if record.lock >= 0:
            os.close(record.lock)
            record.lock = -1

    def forget(self, record: Record) -> None:
        """Remove a record of this process, with its lock."""
        for suffix in ("json", "lock"):
            (self.records_folder / f"{record.id}.{suffix}").unlink(missing_ok=True)
        self.release(record)

    def records(self) -> list[Record]:
        """All records, oldest first; the state of one whose process was killed is "lost", of one that cannot be read "damaged"."""
        found = []
        for path in self.records_folder.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                try:
                    record = Record(**json.loads(path.read_text()))
                except (ValueError, TypeError):
                    record = Record(id=path.stem, name=path.stem, driver="?", spec={}, state=DAMAGED)
                    record.created = path.stat().st_mtime
                    found.append(record)
                    continue
                if record.state != State.PAUSED.value and not self.is_live(record.id):
                    record.state = LOST
                found.append(record)
        return sorted(found, key=lambda record: (record.created, record.id))

    def find(self, name: str) -> Record:
        """The record of a sandbox by name or id. Raises SandboxError."""
        records = self.records()
        for record in records:
            if name in (record.name, record.id):
                return record
        known = ", ".join(record.name for record in records[:8]) or "none"
        raise NoSuchSandbox(f"there is no sandbox {name!r} in {self.folder}; there are: {known}")

    def take(self, name: str) -> Record:
        """Lock a paused sandbox's record for this process. Raises SandboxError if that cannot be."""
        record = self.find(name)
        if record.state == DAMAGED:
            raise StoreDamaged(
                f"the record of sandbox {record.id} ({self.records_folder / record.id}.json) cannot be read; its snapshots "
                f"are listed by perilune sandbox ps and can be resumed, and perilune sandbox rm {record.id} strikes it off the list"
            )
        if record.state == LOST:
            saved = (
                f"; its last snapshot is {record.snapshot} (perilune sandbox resume {record.snapshot})"
                if record.snapshot
                else ""
            )
            raise GuestLost(
                f"sandbox {record.name} is lost: the process that had it (pid {record.pid}) was killed{saved}"
            )
        record.lock = self._lock(record.id)
        if record.lock < 0:
            raise SandboxError(
                f"sandbox {record.name} is in use by process {record.pid}; one that a service has is reached with --url URL"
            )
        path = self.records_folder / f"{record.id}.json"
        try:
            record = Record(**json.loads(path.read_text()), lock=record.lock)
        except FileNotFoundError:
            self.forget(record)
            raise NoSuchSandbox(f"sandbox {record.name} was removed") from None
        record.pid = os.getpid()
        return record

    def remove(self, name: str) -> None:
        """Remove the record of a sandbox that no process has; its snapshots stay. Raises SandboxError."""
        record = self.find(name)
        record.lock = self._lock(record.id)
        if record.lock < 0:
            raise SandboxError(f"sandbox {record.name} is in use by process {record.pid}; end that process first")
        self._sweep({record.id})
        self.forget(record)

    def _sweep(self, ids: set[str]) -> None:
        cgroup.sweep(ids)
        for path in self.folder.glob("*/scratch/*"):
            if path.name.split("-")[0] in ids:
                remove_scratch(path)

    def reap(self) -> int:
        """Clean up after killed processes: their control groups, changed files, locks, and records that nothing can be done with.

        Returns:
            How many such records were removed. One with a snapshot or a chosen name, or of a pool, stays as lost.
        """
        self._sweep({path.stem for path in self.records_folder.glob("*.lock") if not self.is_live(path.stem)})
        removed = 0
        for record in self.records():
            if record.state == LOST and record.snapshot is None and record.name == record.id and not record.pooled:
                with contextlib.suppress(SandboxError):
                    self.remove(record.id)
                    removed += 1
        for path in self.records_folder.glob("*.lock"):
            if not path.with_suffix(".json").exists() and not self.is_live(path.stem):
                path.unlink(missing_ok=True)
        for path in self.records_folder.glob("*.tmp"):
            # Only who has a sandbox writes its record.
            if not self.is_live(path.name.partition(".")[0]):
                path.unlink(missing_ok=True)
        return removed


def sync_folder(path: Path) -> None:
    """Have the disk know which files a folder has."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
