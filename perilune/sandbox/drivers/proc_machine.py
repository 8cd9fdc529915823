"""A live `proc` guest from the host's side: its agent's socket, its process 1, its commands."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perilune.errors import SandboxError
from perilune.sandbox.drivers.cgroup import Group
from perilune.sandbox.drivers.guarantees import guarantees
from perilune.sandbox.drivers.proc_process import CALL_SECONDS, ProcProcess
from perilune.sandbox.drivers.running import Running
from perilune.sandbox.guest import arena, layer, wire
from perilune.sandbox.protocol import DriverUnavailable, GuestFileError, GuestLost, Look, Saved, Spec, StoreDamaged
from perilune.sandbox.store import Batch


class ProcMachine:
    """A live guest: its agent's control socket and the pidfd of its process 1."""

    def __init__(
        self, sandbox: str, control: socket.socket, generation: str, group: Group, spec: Spec, scratch: Path
    ) -> None:
        self.sandbox, self.control, self.group, self.spec, self.scratch = sandbox, control, group, spec, scratch
        self._lock = threading.Lock()
        self._pidfd = self._agent = -1
        self._captured = 0
        self._saved: tuple[int, dict[str, list[str | None]]] | None = None
        """Number of the last capture that was stored whole, and the names of the pieces of each arena in it."""
        self._destroyed = False
        try:
            started, fds = self._answer()
            self._pidfd, self._agent = fds[0], int(started["agent"])
            ready, _ = self._answer()
            if ready.get("ready") != generation:
                raise GuestLost(f"sandbox {sandbox}: another generation answered")
        except BaseException:
            self.destroy()
            raise
        self.guarantees = guarantees(group, spec, bool(ready.get("seccomp")), str(ready.get("changes")))

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

    def capture(self, after: int | None = None) -> Generator[tuple[dict[str, Any], list[bytes | None]], None, None]:
        """All changed files, cut at one instant: the guest is stopped until the last one is read.

        Args:
            after: number of an earlier capture; a piece of a tracked arena that is as it was then comes as `layer.SAME`.
        """
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
                wire.send(self.control, {"op": "capture", "after": after}, [its.fileno()])
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
            self._captured = int(answer.get("capture", 0))
            if failure is not None:
                raise GuestLost(f"sandbox {self.sandbox}: its changed files could not be read: {failure}") from failure

    def save(self, batch: Batch, look: Look) -> Saved:
        """Store all changed files and the list of them."""
        entries: list[dict[str, Any]] = []
        size, arenas = 0, {}
        after, before = self._still_stored(batch)
        self._saved = None
        # Closing what is left of it lets the guest's agent go on after a failure here.
        with contextlib.closing(self.capture(after)) as captured:
            for entry, chunks in captured:
                names = f"{entry['path']}\0{entry.get('to', '')}".encode(errors="surrogateescape")
                look(f"/{entry['path']}", (names, None, *chunks))
                if entry["type"] == "file":
                    known = before.get(entry["path"], [])
                    if layer.SAME in chunks and len(known) != len(chunks):
                        raise GuestLost(
                            f"sandbox {self.sandbox}: /{entry['path']} is told to be as it was, and was not there"
                        )
                    entry["chunks"] = [
                        batch.put(chunk) if chunk else None if chunk is None else known[number]
                        for number, chunk in enumerate(chunks)
                    ]
                    size += entry["size"]
                    if entry["path"].startswith(f"{arena.FOLDER}/"):
                        arenas[entry["path"]] = entry["chunks"]
                entries.append(entry)
        saved = Saved(batch.put(json.dumps(entries).encode()), len(entries), size)
        self._saved = (self._captured, arenas)
        return saved

    def _still_stored(self, batch: Batch) -> tuple[int | None, dict[str, list[str | None]]]:
        """The last save, if all of its arenas' pieces are still in the store: the snapshots that named them may be gone."""
        if self._saved is None:
            return None, {}
        number, arenas = self._saved
        names = {name for chunks in arenas.values() for name in chunks if name is not None}
        return (number, arenas) if all(batch.store.blob_path(name).exists() for name in names) else (None, {})

    def pids(self) -> list[int]:
        """Host processes of the guest: its agent, the agent's keeper, and what they started."""
        for folder in self.group.folders.values():
            with contextlib.suppress(OSError):
                return [int(line) for line in (folder / "cgroup.procs").read_text().split()]
        return descendants(self._agent)

    def unsaved_processes(self) -> int:
        """All but the agent."""
        return len(descendants(self._agent)) - 1

    def file_bytes(self) -> int:
        """Changed files in the guest's tmpfs; 0 where no control group counts them."""
        return self.group.shared_memory_bytes()

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


def _raise_file_error(sandbox: str, command: str, arguments: Mapping[str, Any], text: bytes, timed_out: bool) -> None:
    reason = text.decode(errors="replace").strip()
    with contextlib.suppress(ValueError, TypeError, KeyError):
        reason = json.loads(text)["text"]
    if timed_out:
        reason = f"no answer within {CALL_SECONDS:g} s"
    raise GuestFileError(f"sandbox {sandbox}: {command} {arguments.get('path', '')}: {reason or 'failed'}")


def descendants(pid: int) -> list[int]:
    """A process and all that descend from it, by the kernel's list of children."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                found += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
    return found


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
