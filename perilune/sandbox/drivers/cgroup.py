"""A control group for one sandbox: limits on memory, processes and processor time that the kernel enforces as a whole.

Version 1 hierarchies and version 2 are used, whichever this process may make groups in. What cannot be limited is said, never
assumed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Collection
from pathlib import Path

from perilune.sandbox.protocol import Limits

PERIOD_US = 100_000
REMOVE_SECONDS = 5.0
"""How long the kernel may take to empty a group after its last process was killed."""
FORGOTTEN_SECONDS = 600.0
"""Age from which a group without processes is not one that is being made."""
CONTROLLERS = ("memory", "pids", "cpu")


@functools.cache
def _own_folders() -> dict[str, Path]:
    """For each controller the folder of the group that this process is in; "2" for version 2. Looked up once."""
    found: dict[str, Path] = {}
    try:
        memberships = Path("/proc/self/cgroup").read_text().splitlines()
        mounts = [line.split(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return found
    for line in memberships:
        _, names, path = line.split(":", 2)
        for left, right in mounts:
            kind, _, options = right.split(" ", 2)
            wanted = (
                kind == "cgroup2"
                if not names
                else kind == "cgroup" and set(names.split(",")) <= set(options.split(","))
            )
            if not wanted:
                continue
            inside, mount_point = left.split(" ")[3:5]
            folder = Path(mount_point, os.path.relpath(path, inside))
            folder = folder if folder.is_dir() else Path(mount_point)
            for name in names.split(",") if names else ("2",):
                found.setdefault(name, folder)
    return found


class Group:
    """The control groups of one sandbox.

    Args:
        name: of the folders; unique.
        limits: what to enforce.

    Attributes:
        held: limit -> how it is enforced; of memory, pids, cpu.
        missing: limit -> why it is not.
    """

    def __init__(self, name: str, limits: Limits) -> None:
        self.folders: dict[str, Path] = {}
        self.held: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self._created: list[Path] = []
        own = _own_folders()
        for controller in CONTROLLERS:
            try:
                if controller in own:
                    self._limit_v1(controller, own[controller] / name, limits)
                else:
                    self._limit_v2(controller, own.get("2"), name, limits)
            except OSError as error:
                self.missing[controller] = f"no control group for it: {error.strerror or error}"

    def _make(self, folder: Path) -> None:
        if folder not in self._created:
            folder.mkdir()
            self._created.append(folder)

    def _limit_v1(self, controller: str, folder: Path, limits: Limits) -> None:
        self._make(folder)
        if controller == "memory":
            _write(folder / "memory.limit_in_bytes", str(limits.memory_bytes))
            if (folder / "memory.memsw.limit_in_bytes").exists():
                _write(folder / "memory.memsw.limit_in_bytes", str(limits.memory_bytes))
        elif controller == "pids":
            _write(folder / "pids.max", str(limits.processes + 2))  # Keeper and agent.
        else:
            _write(folder / "cpu.cfs_period_us", str(PERIOD_US))
            _write(folder / "cpu.cfs_quota_us", str(max(1000, int(limits.cpus * PERIOD_US))))
        self.folders[controller] = folder
        self.held[controller] = "control group (version 1)"

    def _limit_v2(self, controller: str, own: Path | None, name: str, limits: Limits) -> None:
        if own is None:
            raise OSError(0, "none is mounted")
        folder = self.folders.get("2") or self._place_v2(own, name)
        if not (folder / {"memory": "memory.max", "pids": "pids.max", "cpu": "cpu.max"}[controller]).exists():
            raise OSError(0, f"the controller {controller!r} is not delegated to {folder.parent}")
        if controller == "memory":
            _write(folder / "memory.max", str(limits.memory_bytes))
            if (folder / "memory.swap.max").exists():
                _write(folder / "memory.swap.max", "0")
        elif controller == "pids":
            _write(folder / "pids.max", str(limits.processes + 2))
        else:
            _write(folder / "cpu.max", f"{max(1000, int(limits.cpus * PERIOD_US))} {PERIOD_US}")
        self.held[controller] = "control group (version 2)"

    def _place_v2(self, own: Path, name: str) -> Path:
        """Make the group below or beside this process's own: one with processes in it cannot hand controllers down."""
        failure: OSError = OSError(0, "no group may be made")
        for parent in (own, own.parent):
            try:
                with contextlib.suppress(OSError):
                    _write(parent / "cgroup.subtree_control", " ".join(f"+{name}" for name in CONTROLLERS))
                if not set((parent / "cgroup.subtree_control").read_text().split()) & set(CONTROLLERS):
                    raise OSError(0, f"no controllers are delegated to {parent}")
                self._make(parent / name)
                self.folders["2"] = parent / name
                return parent / name
            except OSError as error:
                failure = error
        raise failure

    @property
    def paths(self) -> list[str]:
        """Folders that this made, for a record that a later process can clean up from."""
        return [str(folder) for folder in self._created]

    @property
    def procs_files(self) -> list[str]:
        """Files that a process writes itself into."""
        return [f"{folder}/cgroup.procs" for folder in self._created]

    def out_of_memory_kills(self) -> int:
        """How many processes the memory limit has killed."""
        for folder, name in (
            (self.folders.get("memory"), "memory.oom_control"),
            (self.folders.get("2"), "memory.events"),
        ):
            with contextlib.suppress(OSError, AttributeError, TypeError):
                for line in (folder / name).read_text().splitlines():  # pyright: ignore[reportOptionalOperand]
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return 0

    def shared_memory_bytes(self) -> int:
        """Bytes of files in memory that its processes made (tmpfs)."""
        for folder in {self.folders.get("memory"), self.folders.get("2")} - {None}:
            with contextlib.suppress(OSError):
                for line in (folder / "memory.stat").read_text().splitlines():  # pyright: ignore[reportOptionalOperand]
                    if line.startswith("shmem "):
                        return int(line.split()[1])
        return 0

    def remove(self) -> None:
        """Remove the folders once their processes are gone; waits for that, not without end."""
        remove(self.paths)


def remove(paths: list[str]) -> list[str]:
    """Remove the groups of a sandbox whose processes were killed; returns those that stayed."""
    deadline = time.monotonic() + REMOVE_SECONDS
    left = list(paths)
    while left:
        for path in list(left):
            try:
                os.rmdir(path)
            except FileNotFoundError:
                pass
            except OSError:
                continue
            left.remove(path)
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.002)
    return left


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _groups() -> set[Path]:
    """Groups of all sandboxes on this machine, whichever folder they belong to."""
    parents = {parent for folder in _own_folders().values() for parent in (folder, folder.parent)}
    return {path for parent in parents for path in parent.glob("perilune-*-*")}


def sweep(sandboxes: Collection[str]) -> None:
    """Remove the groups that killed owners of these sandboxes (by id) left; waits for their last processes, not without end.

    Groups that have been empty for long belong to folders that nobody looks after any more, and go, too.
    """
    groups = _groups()
    remove(sorted(str(path) for path in groups if path.name.split("-")[1] in sandboxes))
    for path in groups:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > FORGOTTEN_SECONDS:
                os.rmdir(path)  # Refused while a process is in it.
