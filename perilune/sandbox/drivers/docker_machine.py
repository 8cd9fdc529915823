"""A live container from the host's side: its commands, its files, its changes as a layer."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import signal
import socket
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perilune.errors import SandboxError
from perilune.sandbox.drivers.docker_engine import Engine, EngineError, frames
from perilune.sandbox.drivers.proc_machine import descendants
from perilune.sandbox.drivers.running import Running
from perilune.sandbox.guest import layer
from perilune.sandbox.protocol import Guarantee, GuestFileError, GuestLost, Look, Saved, Spec
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
        self.engine, self.sandbox, self.container, self.spec, self.guarantees = (
            engine,
            sandbox,
            container,
            spec,
            guarantees,
        )
        self._own = 0

    def _path(self, rest: str = "") -> str:
        return f"/containers/{self.container}{rest}"

    def _state(self) -> dict[str, Any]:
        try:
            return self.engine.json("GET", self._path("/json"))["State"]
        except EngineError as error:
            raise GuestLost(f"sandbox {self.sandbox}: its container is gone") from error

    def prepare(self, entries: Sequence[Mapping[str, Any]], blobs: str) -> None:
        """Bring a fresh container to the files of a layer."""
        gone = [f"/{entry['path']}" for entry in entries if entry["type"] == "gone" or entry.get("opaque")]
        script = 'for p in "$@"; do rm -rf -- "$p"; done; mkdir -p /workspace'
        self._shell(script, gone)
        if entries:
            self.engine.call("PUT", self._path("/archive"), query={"path": "/"}, data=_as_tar(entries, blobs))
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
        except EngineError as error:
            raise GuestLost(f"sandbox {self.sandbox}: its container does not run: {error}") from error
        return DockerProcess(self, execution, self.engine.attach(execution, terminal), terminal)

    def file_command(self, command: str, arguments: Mapping[str, Any], data: bytes = b"") -> bytes:
        """Read, write or list as the guest would, with its own shell. Raises GuestFileError."""
        path = str(arguments.get("path", ""))
        more = {"read": [str(arguments.get("limit"))], "write": [f"{arguments.get('mode', 0):o}"]}.get(command, [])
        code, out, error = self._shell(SCRIPTS[command], [path, *more], data)
        if code != 0:
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
                yield _folder(path[1:], stat), b""
                continue
            above = os.path.dirname(path)
            for member, content in self.engine.archive(self.container, path):
                entry = _entry(f"{above.rstrip('/')}/{member.name}".strip("/"), member, above)
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
        with contextlib.suppress(SandboxError):
            return bool(self._state()["Running"])
        return False

    def destroy(self) -> None:
        """Remove the container with all that is in it."""
        with contextlib.suppress(EngineError):
            self.engine.call("DELETE", self._path(), query={"force": 1, "v": 1})


class DockerProcess:
    """A command in a container: the engine's one stream, taken apart into pipes by threads."""

    def __init__(self, machine: DockerMachine, execution: str, sock: socket.socket, terminal: bool) -> None:
        self._machine, self._engine, self._sandbox = machine, machine.engine, machine.sandbox
        self._execution, self._sock = execution, sock
        self.stdin = self.stdout = self.stderr = self.terminal = -1
        self._status, self._tell = os.pipe()
        if terminal:
            ours, theirs = socket.socketpair()
            self.terminal = ours.detach()
            work = ((self._copy, sock, theirs), (self._copy, theirs, sock))
            self._kept: list[Any] = [theirs]
        else:
            read, self.stdin = os.pipe()
            self.stdout, out = os.pipe()
            self.stderr, err = os.pipe()
            work = ((self._take, out, err), (self._feed, read))
            self._kept = []
        for function, *arguments in (*work, (self._wait,)):
            threading.Thread(target=function, args=arguments, daemon=True).start()

    def _take(self, out: int, err: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            for stream, data in frames(self._sock):
                view = memoryview(data)
                while view:
                    view = view[os.write(err if stream == 2 else out, view) :]
        os.close(out)
        os.close(err)

    def _feed(self, read: int) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(read, 65536):
                self._sock.sendall(data)
            self._sock.shutdown(socket.SHUT_WR)
        os.close(read)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)

    def _wait(self) -> None:
        """Tell when the program itself has ended; what it left in the background may hold its streams."""
        pause, done = 0.003, {}
        while not done:
            time.sleep(pause)
            pause = min(0.05, pause * 1.5)
            try:
                state = self._engine.json("GET", f"/exec/{self._execution}/json")
            except SandboxError:
                break
            if not state["Running"] and state["ExitCode"] is not None:
                if state["ExitCode"] == 128 + signal.SIGKILL and not self._machine.alive():
                    break
                done = {"code": int(state["ExitCode"])}
        time.sleep(0.01)  # The last of its output is on its way through the engine.
        with contextlib.suppress(OSError):
            os.write(self._tell, json.dumps(done).encode() + b"\n")

    def status_fd(self) -> int:
        """See `protocol.Process`."""
        return self._status

    def finish(self) -> Mapping[str, Any]:
        """See `protocol.Process`; the engine does not tell what a command used."""
        done = json.loads(os.read(self._status, 4096) or b"{}")
        if not done:
            raise GuestLost(f"sandbox {self._sandbox}: the container ended while a command ran")
        number = (
            done["code"] - 128
            if done["code"] in (128 + signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGSEGV)
            else 0
        )
        return {"code": done["code"], "signal": number, "cpu": 0.0, "rss": 0}

    def kill(self) -> None:
        """End the program, what descends from it, and what is still in its session."""
        with contextlib.suppress(SandboxError):
            state = self._engine.json("GET", f"/exec/{self._execution}/json")
            if state["Running"] and state["Pid"]:
                session = _session(int(state["Pid"]))
                others = [pid for pid in self._machine.pids() if session and _session(pid) == session]
                for pid in {*descendants(int(state["Pid"])), *others}:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """See `protocol.Process`."""
        if self._status < 0:
            return
        self.kill()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for kept in self._kept:
            kept.close()
        for fd in {self.stdin, self.stdout, self.stderr, self.terminal, self._status, self._tell} - {-1}:
            os.close(fd)
        self.stdin = self.stdout = self.stderr = self.terminal = self._status = self._tell = -1


def _session(pid: int) -> int:
    """A process's session on the host; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return 0


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


def _folder(path: str, stat: Mapping[str, Any]) -> dict[str, Any]:
    """A folder of the image in which something changed; the engine tells its mode only."""
    sticky = 0o1000 if stat["mode"] & (1 << 20) else 0
    return {
        "path": path,
        "type": "folder",
        "mode": stat["mode"] & 0o777 | sticky,
        "uid": 0,
        "gid": 0,
        "mtime": time.time_ns(),
    }


def _entry(path: str, member: tarfile.TarInfo, above: str) -> dict[str, Any] | None:
    """A member of the engine's archive as an entry of a layer; None for what is not captured."""
    facts = {
        "path": path,
        "mode": member.mode & 0o7777,
        "uid": member.uid,
        "gid": member.gid,
        "mtime": int(member.mtime * 10**9),
    }
    if member.isdir():
        return facts | {"type": "folder"}
    if member.isreg():
        return facts | {"type": "file", "size": member.size}
    if member.issym():
        return facts | {"type": "link", "to": member.linkname}
    if member.islnk():
        return {"path": path, "type": "hard", "to": f"{above.rstrip('/')}/{member.linkname}".strip("/")}
    return facts | {"type": "fifo"} if member.isfifo() else None


def _as_tar(entries: Sequence[Mapping[str, Any]], blobs: str) -> bytes:
    """A layer's entries as an archive that the engine unpacks."""
    kinds = {"folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "fifo": tarfile.FIFOTYPE}
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as file:
        for entry in entries:
            if entry["type"] == "gone":
                continue
            member = tarfile.TarInfo(entry["path"])
            member.type = kinds.get(entry["type"], tarfile.REGTYPE)
            member.linkname = entry.get("to", "")
            member.mode, member.uid, member.gid = entry.get("mode", 0o644), entry.get("uid", 0), entry.get("gid", 0)
            member.mtime = entry.get("mtime", 0) // 10**9
            content = b""
            if entry["type"] == "file":
                left, parts = entry["size"], []
                for name in entry["chunks"]:
                    length = min(layer.CHUNK, left)
                    parts.append(bytes(length) if name is None else layer.load(blobs, name, length))
                    left -= length
                content = b"".join(parts)
                member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return data.getvalue()
