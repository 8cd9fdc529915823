"""The sandbox protocol: what a sandbox can be asked, the states it goes through, what a driver must offer and promise.

    Sandboxes.create ─ exec, files, ports ─ checkpoint ─ fork ─ pause / resume ─ destroy

`client.py` and `sandboxes.py` are the one core that keeps these rules; `drivers/` hold the mechanisms. Every result names its driver and what that
driver guarantees.
"""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from perilune.errors import CapacityError, ConfigError, SandboxError

if TYPE_CHECKING:
    from perilune.sandbox.store import Batch


class State(enum.Enum):
    """Where a sandbox is in its life."""

    CREATING = "creating"
    RUNNING = "running"
    SNAPSHOTTING = "snapshotting"
    FORKING = "forking"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    KILLING = "killing"
    DEAD = "dead"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.CREATING: frozenset({State.RUNNING, State.KILLING}),
    State.RUNNING: frozenset({State.SNAPSHOTTING, State.FORKING, State.PAUSING, State.KILLING}),
    State.SNAPSHOTTING: frozenset({State.RUNNING, State.KILLING}),
    State.FORKING: frozenset({State.RUNNING, State.KILLING}),
    State.PAUSING: frozenset({State.PAUSED, State.RUNNING, State.KILLING}),
    State.PAUSED: frozenset({State.RESUMING, State.KILLING}),
    State.RESUMING: frozenset({State.RUNNING, State.PAUSED, State.KILLING}),
    State.KILLING: frozenset({State.DEAD}),
    State.DEAD: frozenset(),
}
"""Legal changes of state; any other is a `TransitionError`."""
NETWORKS = ("none", "host")
"""none: an own network namespace with loopback only. host: the host's network, with everything that can be reached from it."""


CHANGES = ("memory", "disk")
"""Where changed files are."""
LONGEST_SECONDS = 1_000_000_000
"""Of a command."""


class TransitionError(SandboxError):
    """A call does not fit the sandbox's state; names the state and the one that was asked for."""

    def __init__(self, sandbox: str, now: State, wanted: State | str) -> None:
        goal = wanted.value if isinstance(wanted, State) else wanted
        allowed = ", ".join(sorted(state.value for state in TRANSITIONS[now])) or "nothing"
        super().__init__(
            f"sandbox {sandbox} is {now.value} and cannot go to {goal}; from {now.value} it can go to {allowed}"
        )
        self.now, self.wanted = now, wanted


class NoSuchSandbox(SandboxError):
    """There is no sandbox, snapshot, blob or running command of this name."""


class DriverUnavailable(SandboxError):
    """The driver's probe did not pass on this machine; the message says why."""


class GuestLost(SandboxError):
    """The guest ended or stopped answering; what it had changed since its last snapshot is gone."""


class GuestFileError(SandboxError):
    """A file of the guest could not be read, written or listed."""


class StoreDamaged(SandboxError):
    """A stored blob or snapshot is missing, truncated or corrupt; the message names it."""


class StoreFull(SandboxError, CapacityError):
    """The snapshot store has reached its limit; nothing was published."""


class Mismatch(SandboxError):
    """A snapshot or a manifest does not belong to what it shall be resumed as; `field` names the first difference."""

    def __init__(self, name: str, recorded: object, wanted: object, what: str) -> None:
        super().__init__(f"{what}: {name} differs: it records {recorded!r}, and {wanted!r} is to be resumed")
        self.field = name


class SecretInSnapshot(SandboxError):
    """A file holds a secret that was given to a command; nothing was published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a sandbox may use.

    Attributes:
        memory_bytes: of all its processes, and its changed files where they are in memory, together.
        disk_bytes: of its changed files; where they are on disk, of each of them.
        processes: processes and threads at once.
        open_files: of one process.
        output_bytes: kept of each of stdout and stderr of one command; the rest is counted and dropped.
        cpus: processor time per second of real time.
        exec_seconds: a command's time where none is given.
    """

    memory_bytes: int = 1 << 30
    disk_bytes: int = 256 << 20
    processes: int = 256
    open_files: int = 1024
    output_bytes: int = 16 << 20
    cpus: float = 2.0
    exec_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value, most = getattr(self, name), _MOST.get(name, 1 << 62)
            whole = name not in ("cpus", "exec_seconds")
            if not isinstance(value, int if whole else int | float) or not 0 < value <= most:
                kind = "a whole number " if whole else ""
                raise ConfigError(f"limit {name}={value!r} must be {kind}above zero and at most {most:,}")


_MOST = {"processes": 1 << 22, "open_files": 1 << 30, "cpus": 1_000_000, "exec_seconds": LONGEST_SECONDS}
"""What kernels and clocks take; of bytes, 2**62."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a driver can do here.

    Attributes:
        isolation: what separates guest and host.
        snapshot: what a checkpoint holds: "files" or "machine" (memory, devices and files).
        incremental: a checkpoint stores only what is new.
        fork: a running sandbox can be copied.
        guest_kernel: the guest has a kernel of its own.
        network: network policies that it can keep.
        mounts: the guest may mount file systems.
    """

    isolation: str
    snapshot: str
    incremental: bool
    fork: bool
    guest_kernel: bool
    network: tuple[str, ...]
    mounts: bool


@dataclass(frozen=True, slots=True)
class Guarantee:
    """One promise of a driver on this machine: whether it holds, and by what or why not."""

    name: str
    held: bool
    how: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What a driver found out by running something."""

    driver: str
    passed: bool
    reason: str
    capabilities: Capabilities | None = None
    guarantees: tuple[Guarantee, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a command did.

    Attributes:
        code: exit code; 128 + signal if a signal ended it; 127 or 126 if it could not be started.
        signal: the signal that ended it, else 0.
        stdout, stderr: kept output, at most `Limits.output_bytes` each.
        stdout_bytes, stderr_bytes: all output, kept or not.
        timed_out: its time was over and it was killed.
        out_of_memory: the sandbox's memory limit killed something while it ran.
        seconds, cpu_seconds, peak_bytes: real time, processor time and peak resident memory of it and its reaped children.
        driver, guarantees: which driver ran it, and what that promises.
    """

    code: int
    signal: int
    stdout: bytes
    stderr: bytes
    stdout_bytes: int
    stderr_bytes: int
    timed_out: bool
    out_of_memory: bool
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    driver: str
    guarantees: tuple[Guarantee, ...]

    @property
    def truncated(self) -> bool:
        """Whether output was dropped."""
        return len(self.stdout) < self.stdout_bytes or len(self.stderr) < self.stderr_bytes


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of a command's output as it came: stream is "stdout" or "stderr"."""

    stream: str
    data: bytes


@dataclass(frozen=True, slots=True)
class GuestFile:
    """An entry of a guest's folder; kind is folder, file, link or other."""

    name: str
    kind: str
    size: int
    mode: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """What a sandbox is made from; a snapshot records it whole.

    Attributes:
        template: "host", or the folder of an image's root file system.
        trees: host folders that the guest also sees, its writes to them private.
        changes: where its changed files are until a checkpoint: memory (limited as a whole) or disk (larger, limited each).
    """

    template: str = "host"
    trees: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    network: str = "none"
    changes: str = "memory"

    def __post_init__(self) -> None:
        if not self.template or not all(self.trees):  # A path of nothing would be wherever this process happens to be.
            raise ConfigError(
                f"template={self.template!r} and trees={list(self.trees)!r} must not be empty; leave out what is not wanted"
            )
        if self.changes not in CHANGES:
            raise ConfigError(f"changes={self.changes!r} is not one of {', '.join(CHANGES)}")
        disk, memory = self.limits.disk_bytes, self.limits.memory_bytes
        if self.changes == "memory" and disk + (32 << 20) > memory:
            raise ConfigError(
                f"disk_bytes={disk} must leave 32 MiB of memory_bytes={memory}, for changed files live in memory; "
                "set changes to disk to keep them on disk"
            )
        if self.network not in NETWORKS:
            raise ConfigError(f"network={self.network!r} is not one of {', '.join(NETWORKS)}")


class Process(Protocol):
    """A started command, as a driver gives it: descriptors of its streams and a status to wait for."""

    stdin: int
    stdout: int
    stderr: int
    terminal: int

    def status_fd(self) -> int:
        """Becomes readable when `finish` will not wait."""
        ...

    def finish(self) -> Mapping[str, Any]:
        """`code`, `signal`, `cpu`, `rss`. Raises GuestLost when the guest ended first."""
        ...

    def resize(self, rows: int, columns: int) -> None:
        """Tell a program on a pseudo-terminal how large its window is. Raises OSError if it has ended."""
        ...

    def kill(self) -> None:
        """End it and everything that it started and that is still in its session."""
        ...

    def close(self) -> None:
        """Give the descriptors back; a command that still runs is killed."""
        ...


@dataclass(frozen=True, slots=True)
class Saved:
    """What `Machine.save` stored.

    Attributes:
        layer: blob that names all others.
        entries: files, or regions of memory and devices.
        bytes: of content.
    """

    layer: str
    entries: int
    bytes: int


Look = Callable[[str, Iterable[bytes | None]], None]
"""Is shown where something comes from and its pieces in order (None: zeros) before it is stored; raises `SecretInSnapshot`."""


class Machine(Protocol):
    """One live guest of a driver. Calls take at most the driver's time limit and end in `GuestLost` after it."""

    guarantees: tuple[Guarantee, ...]

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, terminal: bool = False) -> Process: ...
    def file_command(self, command: str, arguments: Mapping[str, Any], data: bytes = b"") -> bytes: ...
    def connect(self, port: int) -> socket.socket: ...
    def freeze(self) -> int: ...
    def thaw(self) -> None: ...
    def save(self, batch: Batch, look: Look) -> Saved:
        """Store what must be kept of the guest, cut at one instant; it does not run meanwhile."""
        ...

    def out_of_memory_kills(self) -> int: ...
    def pids(self) -> list[int]:
        """Host processes whose memory is this guest's."""
        ...

    def unsaved_processes(self) -> int:
        """How many of the guest's processes a snapshot would not bring back."""
        ...

    def file_bytes(self) -> int:
        """Bytes of its files that are in memory and in no map of `pids`."""
        ...

    def alive(self) -> bool: ...
    def destroy(self) -> None: ...


class Driver(Protocol):
    """A mechanism that makes machines.

    Attributes:
        contains: what its snapshots hold, "files" or "machine".
    """

    name: str
    contains: str

    def probe(self) -> Probe: ...
    def make(self, sandbox: str, generation: str, spec: Spec, layer: str | None, blobs: str) -> Machine: ...
    def template_hash(self, spec: Spec) -> str: ...
    def close(self) -> None: ...


OnOutput = Callable[[Output], None]
