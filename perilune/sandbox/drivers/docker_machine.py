"""A live container from the host's side: its commands, its files, its changes as a layer."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perilune.errors import SandboxError
from perilune.sandbox.drivers.docker_engine import Engine, EngineError
from perilune.sandbox.drivers.docker_layer import as_tar, changed_folder, entry_of
from perilune.sandbox.drivers.docker_process import ENDING_SECONDS, DockerProcess
from perilune.sandbox.drivers.running import Running
from perilune.sandbox.guest import layer
from perilune.sandbox.protocol import DriverUnavailable, Guarantee, GuestFileError, GuestLost, Look, Saved, Spec
from perilune.sandbox.store import Batch

CALL_SECONDS = 60.0
CHANGED, ADDED, GONE = 0, 1, 2
_GO_FOLDER = 1 << 31
_CLONE_NEWNET = 0x40000000
SCRIPTS = {
    "read": 'test -e "$1" || { echo "No such file or directory" >&2; exit 1; }; test -f "$1" || { echo "is not a regular file" >&2; exit 1; }; '
            's=$(wc -c < "$1") || exit 1; test "$s" -le "$2" || { echo "$s bytes, more than the $2 asked for" >&2; exit 1; }; exec cat "$1"',
    "write": 'test ! -e "$1" || test -f "$1" || { echo "is not a regular file" >&2; exit 1; }; mkdir -p "$(dirname "$1")" && '
             't="$1.perilune-$$" && cat > "$t" && chmod "$2" "$t" && mv -f "$t" "$(readlink -f "$1" || echo "$1")"',
    "list": 'cd "$1" && for f in * .[!.]* ..?*; do test -e "$f" -o -L "$f" || continue; stat -c "%f %s %Y" -- "$f" && printf "%s\\0" "$f"; done',
    "listening": "cat /proc/net/tcp /proc/net/tcp6 2> /dev/null",
}  # fmt: skip
_KINDS = {0o040000: "folder", 0o100000: "file", 0o120000: "link"}


class DockerMachine:
    """A container that runs."""

    def __init__(
        self, engine: Engine, sandbox: str, container: str, spec: Spec, guarantees: tuple[Guarantee, ...]
    ) -> None:
        self.engine, self.sandbox, self.container = engine, sandbox, container
        self.spec, self.guarantees = spec, guarantees
        self._own = 0
        self._pidfd = self._first_process()

    def _path(self, rest: str = "") -> str:
        return f"/containers/{self.container}{rest}"

    def _state(self) -> dict[str, Any]:
        try:
            return self.engine.json("GET", self._path("/json"))["State"]
        except EngineError as error:
            raise GuestLost(f"sandbox {self.sandbox}: its container is gone") from error

    def _first_process(self) -> int:
        """The container's process 1 as a descriptor: it tells at once when it ends, and nobody else gets its number meanwhile.

        Raises:
            DriverUnavailable: the engine's numbers of processes are not this process's, so none may be used here.
        """
        pid = int(self._state()["Pid"])
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(pid)
            with open(f"/proc/{pid}/cgroup") as file:
                if self.container in file.read():
                    return fd
            os.close(fd)
        raise DriverUnavailable(
            f"docker: the engine's process {pid} of container {self.container[:12]} is not to be seen here; the engine must "
            "run on this machine, and not outside of a container that this process is in"
        )

    def prepare(self, entries: Sequence[Mapping[str, Any]], blobs: str) -> None:
        """Bring a fresh container to the files of a layer."""
        gone = [f"/{entry['path']}" for entry in entries if entry["type"] == "gone" or entry.get("opaque")]
        script = 'for p in "$@"; do rm -rf -- "$p"; done; mkdir -p /workspace'
        self._shell(script, gone)
        if entries:
            self.engine.call("PUT", self._path("/archive"), query={"path": "/"}, data=as_tar(entries, blobs))
        self._own = len(self.pids())

    def _shell(self, script: str, arguments: Sequence[str], data: bytes = b"") -> tuple[int, bytes, bytes]:
        environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        with contextlib.closing(self.start(["/bin/sh", "-c", script, "sh", *arguments], environment, "/")) as process:
            running = Running(process, data, time.monotonic() + CALL_SECONDS, keep=1 << 62)
            for _ in running.outputs():
                pass
            return int(process.finish()["code"]), bytes(running.kept["stdout"]), bytes(running.kept["stderr"])

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, terminal: bool = False) -> DockerProcess:
        """Start a program; with `terminal` its streams are one pseudo-terminal of the engine."""
        body = {
            "AttachStdin": True, "AttachStdout": True, "AttachStderr": True, "Tty": terminal, "WorkingDir": cwd,
            # By the guest's shell: its exit codes and words for a program that is not there are everybody's.
            "Cmd": ["/bin/sh", "-c", 'exec "$0" "$@"', *argv],
            "Env": [f"{name}={value}" for name, value in env.items()],
        }  # fmt: skip
        try:
            execution = self.engine.json("POST", self._path("/exec"), body)["Id"]
            return DockerProcess(self, execution, self.engine.attach(execution, terminal), terminal)
        except EngineError as error:
            raise GuestLost(f"sandbox {self.sandbox}: its container does not run: {error}") from error

    def file_command(self, command: str, arguments: Mapping[str, Any], data: bytes = b"") -> bytes:
        """Read, write or list as the guest would, with its own shell. Raises GuestFileError."""
        path = str(arguments.get("path", ""))
        more = {"read": [str(arguments.get("limit"))], "write": [f"{arguments.get('mode', 0):o}"]}.get(command, [])
        code, out, error = self._shell(SCRIPTS[command], [path, *more], data)
        if code != 0:
            if not error and self.ended(ENDING_SECONDS):
                raise GuestLost(f"sandbox {self.sandbox}: its container has ended")
            reason = error.decode(errors="replace").strip().rpartition(": ")[2] or "failed"
            raise GuestFileError(f"sandbox {self.sandbox}: {command} {path}: {reason}")
        if command == "list":
            return json.dumps(sorted(_listed(out))).encode()
        if command == "listening":
            rows = [line.split() for line in out.splitlines()]
            ports = {int(row[1].rpartition(b":")[2], 16) for row in rows if len(row) > 3 and row[3] == b"0A"}
            return json.dumps(sorted(ports)).encode()
        return out

    def connect(self, port: int) -> socket.socket:
        """A socket connected to a port of the guest, made by a thread in the container's network namespace."""
        found: list[socket.socket | OSError] = []
        namespace = os.open(f"/proc/{self._state()['Pid']}/ns/net", os.O_RDONLY)

        def dial() -> None:
            try:
                if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) < 0:
                    raise OSError(ctypes.get_errno(), "setns into the container's network")
                found.append(socket.create_connection(("127.0.0.1", port), CALL_SECONDS))
            except OSError as error:
                found.append(error)

        thread = threading.Thread(target=dial)
        thread.start()
        thread.join()
        os.close(namespace)
        if isinstance(found[0], OSError):
            raise GuestFileError(f"sandbox {self.sandbox}: connect port {port}: {found[0].strerror or found[0]}")
        found[0].settimeout(None)
        return found[0]

    def freeze(self) -> int:
        """Stop all processes; returns how many there are besides the container's own."""
        count = self.unsaved_processes()
        self.engine.call("POST", self._path("/pause"))
        return count

    def thaw(self) -> None:
        """Let them go on."""
        self.engine.call("POST", self._path("/unpause"))

    def save(self, batch: Batch, look: Look) -> Saved:
        """Store what differs from the image, as the engine lists it; the container stands still."""
        entries: list[dict[str, Any]] = []
        size = 0
        for entry, content in self._changed():
            chunks = [content[at : at + layer.CHUNK] for at in range(0, len(content), layer.CHUNK)]
            look(
                f"/{entry['path']}",
                (f"{entry['path']}\0{entry.get('to', '')}".encode(errors="surrogateescape"), None, *chunks),
            )
            if entry["type"] == "file":
                entry["chunks"] = [None if not any(chunk) else batch.put(chunk) for chunk in chunks]
                size += entry["size"]
            layer.check(entry)
            entries.append(entry)
        return Saved(batch.put(json.dumps(entries).encode()), len(entries), size)

    def _changed(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        changes = sorted(
            self.engine.json("GET", self._path("/changes")) or [], key=lambda change: change["Path"].split("/")
        )
        whole = ""  # A folder that was fetched with all below it.
        for change in changes:
            path, kind = change["Path"], change["Kind"]
            if whole and path.startswith(whole + "/"):
                continue
            stat = self.engine.stat(self.container, path)
            if stat is None:
                yield {"path": path[1:], "type": "gone"}, b""
                continue
            folder = bool(stat["mode"] & _GO_FOLDER)
            if folder and kind == CHANGED:
                yield changed_folder(path[1:], stat), b""
                continue
            above = os.path.dirname(path)
            for member, content in self.engine.archive(self.container, path):
                entry = entry_of(f"{above.rstrip('/')}/{member.name}".strip("/"), member, above)
                if entry is not None:
                    # What was deleted and made again hides all that the image had there.
                    yield entry | ({"opaque": True} if kind == GONE and entry["path"] == path[1:] else {}), content
            whole = path if folder else whole

    def out_of_memory_kills(self) -> int:
        """1 once the engine has noted that the limit killed something."""
        return int(bool(self._state().get("OOMKilled")))

    def pids(self) -> list[int]:
        """Host processes of the container."""
        with contextlib.suppress(SandboxError, KeyError):
            found = self.engine.json("GET", self._path("/top"), query={"ps_args": "-eo pid"})
            return [int(row[0]) for row in found["Processes"]]
        return []

    def unsaved_processes(self) -> int:
        """All but the container's own shell and its sleep."""
        return max(0, len(self.pids()) - self._own)

    def file_bytes(self) -> int:
        """Changed files are on the engine's disk."""
        return 0

    def alive(self) -> bool:
        """Whether the container runs."""
        return not self.ended()

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether the container has ended, or does within that time: a process of it may be seen to be killed before its first one."""
        return self._pidfd < 0 or bool(select.select([self._pidfd], [], [], seconds)[0])

    def destroy(self) -> None:
        """Remove the container with all that is in it."""
        with contextlib.suppress(EngineError):
            self.engine.call("DELETE", self._path(), query={"force": 1, "v": 1})
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _listed(out: bytes) -> Iterator[list[Any]]:
    for row in out.split(b"\0")[:-1]:
        facts, _, name = row.partition(b"\n")
        mode, size, seconds = facts.split()
        bits = int(mode, 16)
        yield [
            name.decode(errors="surrogateescape"),
            _KINDS.get(bits & 0o170000, "other"),
            int(size),
            bits & 0o7777,
            int(seconds) * 10**9,
        ]
