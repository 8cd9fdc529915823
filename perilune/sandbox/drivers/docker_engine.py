"""A container engine through its HTTP API on a Unix socket (Docker's; Podman speaks it, too), with the standard library."""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import socket
import struct
import tarfile
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

from perilune.errors import SandboxError
from perilune.sandbox.protocol import DriverUnavailable, GuestLost

SOCKETS = ("/var/run/docker.sock", "/run/podman/podman.sock")
CALL_SECONDS = 60.0
"""Time limit of every call; an engine that does not answer is not there."""
_HEAD = struct.Struct(">BxxxI")


def engine_socket() -> str:
    """The engine's socket: that of $DOCKER_HOST if it is a Unix socket, else the first that exists. Raises DriverUnavailable."""
    host = os.environ.get("DOCKER_HOST", "")
    if host.startswith("unix://"):
        return host.removeprefix("unix://")
    for path in SOCKETS:
        if os.path.exists(path):
            return path
    raise DriverUnavailable(
        f"docker: no engine: none of {', '.join(SOCKETS)} exists and DOCKER_HOST names none; install docker.io or podman and start it"
    )


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("engine", timeout=CALL_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(CALL_SECONDS)
        self.sock.connect(self._path)


class EngineError(SandboxError):
    """The engine refused a call; `status` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"docker: {message}")
        self.status = status


class Engine:
    """Calls of one engine. Raises DriverUnavailable where it cannot be reached and `EngineError` where it refuses."""

    def __init__(self, path: str) -> None:
        self.path = path

    def call(
        self, method: str, path: str, body: Any = None, query: dict[str, Any] | None = None, data: bytes | None = None
    ) -> bytes:  # fmt: skip
        """One request; `body` goes as JSON, `data` as it is; returns the answer's body."""
        return self._answer(method, path, body, query, data)[1]

    def json(self, method: str, path: str, body: Any = None, query: dict[str, Any] | None = None) -> Any:
        """The same for an answer in JSON."""
        return json.loads(self.call(method, path, body, query) or b"null")

    def stat(self, container: str, path: str) -> dict[str, Any] | None:
        """What the engine says of a container's file without following it: `mode` as Go has it, `size`; None if it is not there."""
        try:
            headers, _ = self._answer("HEAD", f"/containers/{container}/archive", None, {"path": path}, None)
        except EngineError as error:
            if error.status == 404:
                return None
            raise
        return json.loads(base64.b64decode(headers["X-Docker-Container-Path-Stat"]))

    def archive(self, container: str, path: str) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
        """A file, or a folder with all below it, as members of a tar archive with their content."""
        data = self.call("GET", f"/containers/{container}/archive", query={"path": path})
        with tarfile.open(fileobj=io.BytesIO(data)) as file:
            for member in file:
                content = file.extractfile(member) if member.isreg() else None
                yield member, content.read() if content is not None else b""

    def _answer(
        self, method: str, path: str, body: Any, query: dict[str, Any] | None, data: bytes | None
    ) -> tuple[Any, bytes]:
        target = quote(path) + (f"?{urlencode(query)}" if query else "")
        headers = {"Content-Type": "application/x-tar"} if data is not None else {}
        if body is not None:
            data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        connection = _Connection(self.path)
        try:
            connection.request(method, target, data, headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise DriverUnavailable(f"docker: the engine at {self.path} does not answer: {error}") from error
        finally:
            connection.close()
        if answer.status >= 400:
            try:
                message = json.loads(content)["message"]
            except (ValueError, KeyError, TypeError):
                message = content[:200].decode(errors="replace") or f"{method} {path}: {answer.status}"
            raise EngineError(answer.status, str(message))
        return answer.headers, content

    def attach(self, execution: str, terminal: bool) -> socket.socket:
        """Start a prepared execution; a socket that carries its input and output. Raises GuestLost if it cannot be."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CALL_SECONDS)
            sock.connect(self.path)
            body = json.dumps({"Detach": False, "Tty": terminal}).encode()
            head = (
                f"POST /exec/{execution}/start HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\nConnection: Upgrade\r\n"
                f"Upgrade: tcp\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            sock.sendall(head.encode() + body)
            said = b""
            while b"\r\n\r\n" not in said:  # Byte by byte: what follows is the command's.
                byte = sock.recv(1)
                if not byte:
                    raise OSError(0, f"it said {said[:100]!r}")
                said += byte
            if int(said.split(b" ", 2)[1]) not in (101, 200):
                raise OSError(0, f"it said {said[:100]!r}")
            sock.settimeout(None)
            return sock
        except (OSError, ValueError) as error:
            sock.close()
            raise GuestLost(f"docker: the engine did not start a command: {error}") from error


def frames(sock: socket.socket) -> Iterator[tuple[int, bytes]]:
    """What a command without a terminal writes: 1 for stdout or 2 for stderr, and a piece."""
    with sock.makefile("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            stream, size = _HEAD.unpack(head)
            left = size
            while left:
                data = file.read1(left)
                if not data:
                    return
                left -= len(data)
                yield stream, data
