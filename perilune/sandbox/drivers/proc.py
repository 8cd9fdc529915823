"""The `proc` driver: processes in their own namespaces on the host's kernel, files as overlays in a size-limited tmpfs.

A fork server (`guest/zygote.py`) makes each sandbox in a few milliseconds. Snapshots hold files: processes are in none, and a
resumed sandbox starts without any. Works for root and, where user namespaces are allowed, for any user.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perilune.errors import SandboxError
from perilune.sandbox import template
from perilune.sandbox.drivers.cgroup import Group
from perilune.sandbox.drivers.running import Running
from perilune.sandbox.guest import layer, wire
from perilune.sandbox.protocol import (
    Capabilities,
    DriverUnavailable,
    Guarantee,
    GuestFileError,
    GuestLost,
    Probe,
    Spec,
    StoreDamaged,
)  # fmt: skip

CALL_SECONDS = 30.0
"""Time limit of every call to the fork server or to an agent; one that does not answer is ended."""
INODES = 200_000
CAPABILITIES = Capabilities(
    isolation="namespaces", snapshot="files", incremental=True, fork=True, guest_kernel=False, network=("none", "host"),
    mounts=False,
)  # fmt: skip


class ProcDriver:
    """Makes `proc` sandboxes.

    Args:
        folder: where it keeps its templates and the mount point; sandboxes of one folder share them.
    """

    name = "proc"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._lock = threading.Lock()

    def probe(self) -> Probe:
        """Make a sandbox, run programs in it, save it, run programs in the restored one; says what of it failed."""
        from perilune.sandbox.drivers.probing import examine

        return examine(self, CAPABILITIES)

    def template_hash(self, spec: Spec) -> str:
        """Identity of what a sandbox starts from."""
        return template.template_hash(spec, self.folder / "templates")

    def _ask(self, request: dict[str, Any], control: socket.socket) -> None:
        with self._lock:
            if self._server is None or self._server.poll() is not None:
                self._start_server()
            assert self._requests is not None
            wire.send(self._requests, request, [control.fileno()])

    def _start_server(self) -> None:
        mine, its = wire.pair()
        code = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[3])!r}); "
            "from perilune.sandbox.guest.zygote import serve; serve(int(sys.argv[1]))"
        )
        # Nothing of the owner's environment, which may hold keys, is in the memory of a process beside a guest.
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        self._server = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, str(its.fileno())], pass_fds=[its.fileno()], env=kept, cwd="/",
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        its.close()
        mine.settimeout(CALL_SECONDS)
        self._requests = mine

    def make(self, sandbox: str, generation: str, spec: Spec, layer: str | None, blobs: str) -> ProcMachine:
        """Start a guest.

        Args:
            sandbox, generation: its names; the agent must answer with this generation.
            layer: blob of the changed files to start from, or None.
            blobs: the store's blob folder.

        Raises:
            DriverUnavailable: the kernel refused a namespace or a mount (which one is said).
            SandboxError: a stored blob is damaged.
        """
        if sys.platform != "linux":
            raise DriverUnavailable(
                f"proc needs Linux; this is {sys.platform}. In a Linux virtual machine or container it works"
            )
        base = self.folder / "mount"
        base.mkdir(parents=True, exist_ok=True)
        scratch = self.folder / "scratch" / f"{sandbox}-{generation[:8]}"
        scratch.mkdir(parents=True)
        group = Group(f"perilune-{sandbox}-{generation[:8]}", spec.limits)
        limits = spec.limits
        rlimits = {
            "RLIMIT_NOFILE": limits.open_files, "RLIMIT_CORE": 0, "RLIMIT_FSIZE": limits.disk_bytes,
            "RLIMIT_NPROC": limits.processes,
        }  # fmt: skip
        if "memory" in group.missing:
            rlimits["RLIMIT_AS"] = limits.memory_bytes
        mine, its = wire.pair()
        mine.settimeout(CALL_SECONDS)
        try:
            request = {
                "generation": generation, "hostname": sandbox[:63], "base": str(base), "network": spec.network,
                "trees": template.trees(spec, self.folder / "templates"), "disk_bytes": limits.disk_bytes, "inodes": INODES,
                "layer": layer, "blobs": blobs, "uid": os.geteuid(), "gid": os.getegid(), "rlimits": rlimits,
                "cgroup_procs": group.procs_files, "changes": spec.changes, "scratch": str(scratch),
            }  # fmt: skip
            self._ask(request, its)
            its.close()
            return ProcMachine(sandbox, mine, generation, group, spec, scratch)
        except BaseException as error:
            its.close()
            mine.close()
            group.remove()
            remove_scratch(scratch)
            if isinstance(error, (OSError, wire.Malformed)):
                raise DriverUnavailable(f"proc: the fork server does not answer: {error}") from error
            raise

    def close(self) -> None:
        """End the fork server; machines that still live end with it."""
        with self._lock:
            if self._requests is not None:
                self._requests.close()
                self._requests = None
            if self._server is not None:
                try:
                    self._server.wait(CALL_SECONDS)
                except subprocess.TimeoutExpired:
                    self._server.kill()
                    self._server.wait()
                self._server = None


class ProcMachine:
    """A live guest: its agent's control socket and the pidfd of its process 1."""

    def __init__(
        self, sandbox: str, control: socket.socket, generation: str, group: Group, spec: Spec, scratch: Path
    ) -> None:
        self.sandbox, self.control, self.group, self.spec, self.scratch = sandbox, control, group, spec, scratch
        self._lock = threading.Lock()
        self._pidfd = -1
        self._destroyed = False
        try:
            _, fds = self._answer()
            self._pidfd = fds[0]
            ready, _ = self._answer()
            if ready.get("ready") != generation:
                raise GuestLost(f"sandbox {sandbox}: another generation answered")
        except BaseException:
            self.destroy()
            raise
        self.guarantees = _guarantees(group, spec, bool(ready.get("seccomp")), str(ready.get("changes")))

    def _message(self) -> tuple[dict[str, Any], list[int]]:
        try:
            message = wire.receive(self.control)
        except (OSError, wire.Malformed) as error:
            raise GuestLost(f"sandbox {self.sandbox}: its agent does not answer: {error}") from error
        if message is None:
            raise GuestLost(f"sandbox {self.sandbox}: the guest has ended")
        return message

    def _answer(self) -> tuple[dict[str, Any], list[int]]:
        """The next message of a guest that is being made."""
        message, fds = self._message()
        if "error" not in message:
            return message, fds
        text, disk = str(message["error"]), self.spec.limits.disk_bytes
        if message.get("kind") == "ValueError":
            raise StoreDamaged(f"sandbox {self.sandbox} cannot be restored: {text}")
        if message.get("kind") == layer.NoRoom.__name__:
            raise SandboxError(f"sandbox {self.sandbox}: its files do not fit into disk_bytes={disk}")
        raise DriverUnavailable(f"proc: {text}")

    def _call(self, operation: str, fds: Sequence[int] = ()) -> dict[str, Any]:
        with self._lock:
            try:
                wire.send(self.control, {"op": operation}, fds)
            except OSError as error:
                raise GuestLost(f"sandbox {self.sandbox}: the guest has ended") from error
            answer = self._message()[0]
            if "error" in answer:
                raise SandboxError(f"sandbox {self.sandbox}: {answer['error']}")
            if answer.get("done") != operation:
                raise GuestLost(f"sandbox {self.sandbox}: its agent answers {answer.get('done')!r} to {operation!r}")
            return answer

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, terminal: bool = False) -> ProcProcess:
        """Start a program; with `terminal` its streams are one pseudo-terminal."""
        message = {"op": "run", "argv": list(argv), "env": dict(env), "cwd": cwd, "terminal": terminal}
        return self._run(message, terminal)

    def _run(self, message: dict[str, Any], terminal: bool = False, reply: socket.socket | None = None) -> ProcProcess:
        mine, its = wire.pair()
        ours: list[int] = []
        theirs: list[int] = []
        if not terminal:
            for number in range(3):
                read, write = os.pipe()
                ours.append(write if number == 0 else read)
                theirs.append(read if number == 0 else write)
        try:
            sent = [theirs[0], reply.fileno(), theirs[2]] if reply else theirs
            with self._lock:
                wire.send(self.control, message, [*sent, its.fileno()])
            master = -1
            if terminal:
                mine.settimeout(CALL_SECONDS)
                answer = wire.receive(mine)
                if answer is None or not answer[1]:
                    raise SandboxError(f"sandbox {self.sandbox}: no terminal: {answer and answer[0].get('error')}")
                master = answer[1][0]
            return ProcProcess(self.sandbox, mine, ours, master)
        except BaseException as error:
            mine.close()
            for fd in ours:
                os.close(fd)
            if isinstance(error, OSError):
                raise GuestLost(f"sandbox {self.sandbox}: the guest has ended") from error
            raise
        finally:
            its.close()
            for fd in theirs:
                os.close(fd)

    def file_command(self, command: str, arguments: Mapping[str, Any], data: bytes = b"") -> bytes:
        """Do one of `guest/commands.FILE_COMMANDS` as a guest process; returns its output.

        Raises:
            GuestFileError: what the guest's kernel said about the path.
        """
        with contextlib.closing(self._run({"op": "run", "command": command, **arguments})) as process:
            running = Running(process, data, time.monotonic() + CALL_SECONDS, keep=1 << 62)
            for _ in running.outputs():
                pass
            done = process.finish()
        if done["code"] != 0:
            _raise_file_error(self.sandbox, command, arguments, bytes(running.kept["stderr"]), running.timed_out)
        return bytes(running.kept["stdout"])

    def connect(self, port: int) -> socket.socket:
        """A socket connected to a port that the guest listens on, made inside of the guest's network namespace."""
        mine, its = wire.pair()
        mine.settimeout(CALL_SECONDS)
        with contextlib.closing(mine), contextlib.closing(its):
            with contextlib.closing(self._run({"op": "run", "command": "connect", "port": port}, reply=its)) as process:
                its.close()
                answer = wire.receive(mine)
                if answer is None:
                    os.set_blocking(process.stderr, True)
                    _raise_file_error(
                        self.sandbox, "connect", {"path": f"port {port}"}, os.read(process.stderr, 4096), False
                    )
                assert answer is not None
                process.finish()
                return socket.socket(fileno=answer[1][0])

    def freeze(self) -> int:
        """Stop all processes; returns how many there are."""
        return int(self._call("freeze")["processes"])

    def thaw(self) -> None:
        """Let them go on."""
        self._call("thaw")

    def capture(self) -> Generator[tuple[dict[str, Any], list[bytes | None]], None, None]:
        """All changed files, cut at one instant: the guest is stopped until the last one is read."""
        mine, its = socket.socketpair()
        mine.settimeout(CALL_SECONDS)
        with self._lock:
            file = mine.makefile("rb", buffering=1 << 18)

            def read(count: int) -> bytes:
                data = file.read(count)
                if len(data) != count:
                    raise GuestLost(f"sandbox {self.sandbox}: the guest ended while it was saved")
                return data

            failure: Exception | None = None
            try:
                wire.send(self.control, {"op": "capture"}, [its.fileno()])
                its.close()
                yield from layer.read_stream(read, self.spec.limits.disk_bytes * 2)
            except (OSError, ValueError, GuestLost) as error:
                failure = error
            finally:
                # A reader that stops early breaks the agent's pipe; its answer is taken all the same.
                its.close()
                file.close()
                mine.close()
                answer = self._message()[0]
            if "error" in answer:
                raise SandboxError(f"sandbox {self.sandbox} cannot be saved: {answer['error']}")
            if failure is not None:
                raise GuestLost(f"sandbox {self.sandbox}: its changed files could not be read: {failure}") from failure

    def out_of_memory_kills(self) -> int:
        """How many processes the memory limit has ended so far."""
        return self.group.out_of_memory_kills()

    def alive(self) -> bool:
        """Whether process 1 still lives."""
        return not self._destroyed and not select.select([self._pidfd], [], [], 0)[0]

    def destroy(self) -> None:
        """End every process of the guest and wait until they are gone; frees its memory, its mounts and its control groups."""
        if self._destroyed:
            return
        self._destroyed = True
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            # Readable once the kernel has ended the whole process namespace.
            select.select([self._pidfd], [], [], CALL_SECONDS)
            os.close(self._pidfd)
        self.control.close()
        self.group.remove()
        remove_scratch(self.scratch)


class ProcProcess:
    """A command of a `ProcMachine`."""

    def __init__(self, sandbox: str, status: socket.socket, pipes: Sequence[int], terminal: int) -> None:
        self.sandbox, self.status, self.terminal = sandbox, status, terminal
        self.stdin, self.stdout, self.stderr = pipes or (-1, -1, -1)

    def status_fd(self) -> int:
        """See `protocol.Process`."""
        return self.status.fileno()

    def finish(self) -> Mapping[str, Any]:
        """See `protocol.Process`."""
        self.status.settimeout(CALL_SECONDS)
        try:
            try:
                message = wire.receive(self.status)
            except (
                ConnectionResetError
            ):  # The agent had ended with it before our kill was read; its message is still there.
                message = wire.receive(self.status)
        except (OSError, wire.Malformed) as error:
            raise GuestLost(f"sandbox {self.sandbox}: its agent does not answer: {error}") from error
        if message is None:
            raise GuestLost(f"sandbox {self.sandbox}: the guest ended while a command ran")
        if "error" in message[0]:
            raise SandboxError(f"sandbox {self.sandbox}: {message[0]['error']}; raise limits.processes or end some")
        return message[0]

    def kill(self) -> None:
        """See `protocol.Process`."""
        with contextlib.suppress(OSError):
            wire.send(self.status, {"op": "kill"})

    def close(self) -> None:
        """See `protocol.Process`."""
        self.status.close()
        for name in ("stdin", "stdout", "stderr", "terminal"):
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)


def _raise_file_error(sandbox: str, command: str, arguments: Mapping[str, Any], text: bytes, timed_out: bool) -> None:
    reason = text.decode(errors="replace").strip()
    with contextlib.suppress(ValueError, TypeError, KeyError):
        reason = json.loads(text)["text"]
    if timed_out:
        reason = f"no answer within {CALL_SECONDS:g} s"
    raise GuestFileError(f"sandbox {sandbox}: {command} {arguments.get('path', '')}: {reason or 'failed'}")


def _guarantees(group: Group, spec: Spec, filtered: bool, changes: str) -> tuple[Guarantee, ...]:
    limits, root = spec.limits, os.geteuid() == 0

    def limited(controller: str, otherwise: tuple[bool, str]) -> tuple[bool, str]:
        return (True, group.held[controller]) if controller in group.held else otherwise

    missing = group.missing
    memory = limited("memory", (False, f"address space of each process only; {missing.get('memory')}"))
    pids = limited(
        "pids",
        (not root, f"not for root's guests; {missing.get('pids')}" if root else "RLIMIT_NPROC of its user namespace"),
    )
    cpu = limited("cpu", (False, str(missing.get("cpu"))))
    disk = f"{limits.disk_bytes} bytes: size of the tmpfs that holds changed files"
    if changes != "memory":
        why = (
            "as asked for"
            if spec.changes == "disk"
            else "this kernel's tmpfs keeps no user attributes (Linux 6.6 does)"
        )
        disk = f"{limits.disk_bytes} bytes for each changed file only; they are on disk, {why}"
    own_network = spec.network == "none"
    return (
        Guarantee("isolation", True, "own user, process, mount, IPC, UTS and cgroup namespaces; the kernel is the host's"),
        Guarantee("guest kernel", False, "the host's kernel runs the guest"),
        Guarantee("unprivileged", not root, "guest root is root outside but for its namespaces, dropped capabilities and filter"
                  if root else "guest root is the calling user outside"),
        Guarantee("network", own_network, "own network namespace, loopback only" if own_network else "shares the host's network"),
        Guarantee("system calls", filtered, "seccomp filter" if filtered else "no filter for this processor"),
        Guarantee("memory limit", memory[0], f"{limits.memory_bytes} bytes: {memory[1]}"),
        Guarantee("process limit", pids[0], f"{limits.processes}: {pids[1]}"),
        Guarantee("processor limit", cpu[0], f"{limits.cpus:g}: {cpu[1]}"),
        Guarantee("disk limit", changes == "memory", disk),
        Guarantee(
            "changes to /usr",
            root,
            "the guest may change its view of programs that belong to root"
            if root
            else "files that belong to the host's root are read-only for guests of other users; /workspace, /root, /etc, /tmp and /opt are not",
        ),
        Guarantee("no orphans", True, "the kernel ends all processes with their owner"),
        Guarantee("memory snapshot", False, "snapshots hold files; processes are not saved"),
    )  # fmt: skip


def remove_scratch(folder: Path) -> None:
    """Remove the folder of changed files of a sandbox that has ended; a guest may have taken its owner's rights to parts of it."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)
        return
    for root, names, _ in os.walk(folder):
        for name in names:
            if not os.path.islink(f"{root}/{name}"):
                os.chmod(f"{root}/{name}", 0o700)
    shutil.rmtree(folder, ignore_errors=True)
