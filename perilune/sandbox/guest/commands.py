"""What a child of the agent does: take a guest's limits, then run a program or read, write and list files as the guest would.

File access runs with the guest's privileges under the guest's root, so no link or mount of the guest can lead it elsewhere.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import stat
from collections.abc import Callable
from typing import Any

from perilune.sandbox.guest import wire

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit codes of a program that cannot be started, as shells give them."""
CONNECT_SECONDS = 5.0


def set_limits(request: dict[str, Any]) -> None:
    """Signals and resource limits of a guest process; its privileges and its filter are those of the agent already."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGCHLD):  # Those that Python has changed.
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name, value in request["rlimits"].items():
        limit = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    os.umask(0o022)


def execute(argv: list[str], env: dict[str, str], cwd: str) -> int:
    """Replace this process by a program; returns an exit code only where that failed, having said why on stderr."""
    try:
        os.chdir(cwd)
    except OSError as error:
        return _say(NOT_EXECUTABLE, f"cannot enter the folder {cwd!r}: {error.strerror}")
    folders = [""] if "/" in argv[0] else env.get("PATH", "").split(":")
    failure = errno.ENOENT
    for folder in folders:
        try:
            os.execve(f"{folder}/{argv[0]}" if folder else argv[0], argv, env)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                failure = error.errno or errno.EACCES
    return _say(
        NOT_FOUND if failure == errno.ENOENT else NOT_EXECUTABLE, f"cannot execute {argv[0]!r}: {os.strerror(failure)}"
    )


def _say(code: int, text: str) -> int:
    os.write(2, f"perilune: {text}\n".encode(errors="surrogateescape"))
    return code


def _read(request: dict[str, Any]) -> None:
    fd = _regular(request["path"], os.O_RDONLY)
    size, left = os.fstat(fd).st_size, request["limit"]
    if size > left:
        raise OSError(errno.EFBIG, f"{size} bytes, more than the {left} asked for")
    while data := os.read(fd, min(left + 1, 1 << 20)):
        left -= len(data)
        if left < 0:
            raise OSError(errno.EFBIG, f"more than {request['limit']} bytes")
        _write_all(1, data)


def _regular(path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "is not a regular file")
    return fd


def _write_file(request: dict[str, Any]) -> None:
    # Through links, as a program would write; a new name and a rename, so that a reader never sees half of it.
    path = os.path.realpath(request["path"])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "is not a regular file")
    temporary = f"{path}.perilune-{os.getpid()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        while data := os.read(0, 1 << 20):
            _write_all(fd, data)
        os.fchmod(fd, request["mode"])
        os.close(fd)
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _list(request: dict[str, Any]) -> None:
    kinds = {stat.S_IFDIR: "folder", stat.S_IFREG: "file", stat.S_IFLNK: "link"}
    found = []
    with os.scandir(request["path"]) as entries:
        for entry in entries:
            info = entry.stat(follow_symlinks=False)
            kind = kinds.get(stat.S_IFMT(info.st_mode), "other")
            found.append([entry.name, kind, info.st_size, stat.S_IMODE(info.st_mode), info.st_mtime_ns])
    _write_all(1, json.dumps(sorted(found)).encode())


def _listening(request: dict[str, Any]) -> None:
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if os.path.exists(table):
            with open(table, "rb") as file:
                rows = [line.split() for line in file][1:]
            ports |= {int(row[1].rpartition(b":")[2], 16) for row in rows if row[3] == b"0A"}
    _write_all(1, json.dumps(sorted(ports)).encode())


def _connect(request: dict[str, Any]) -> None:
    # The connected socket goes to the host; it stays in this network namespace.
    reply = socket.socket(fileno=1)
    sock = socket.socket(socket.AF_INET)
    try:
        _dial(sock, "127.0.0.1", request["port"])
    except OSError:
        sock = socket.socket(socket.AF_INET6)
        _dial(sock, "::1", request["port"])
    wire.send(reply, {}, [sock.fileno()])


def _dial(sock: socket.socket, address: str, port: int) -> None:
    sock.settimeout(CONNECT_SECONDS)
    sock.connect((address, port))
    sock.settimeout(None)


FILE_COMMANDS: dict[str, Callable[[dict[str, Any]], None]] = {
    "read": _read, "write": _write_file, "list": _list, "listening": _listening, "connect": _connect,
}  # fmt: skip


def run_file_command(request: dict[str, Any]) -> int:
    """Do one of `FILE_COMMANDS`; a failure is told as JSON on stderr with exit code 1."""
    try:
        FILE_COMMANDS[request["command"]](request)
    except OSError as error:
        text = error.strerror or str(error)
        _write_all(2, json.dumps({"errno": error.errno or 0, "text": text}).encode())
        return 1
    return 0


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
