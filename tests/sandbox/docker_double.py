"""An engine that says again what a real one has said: exchanges recorded from Docker's API, played back on a Unix socket.

    python tests/sandbox/docker_double.py /var/run/docker.sock      # records docker_recorded.json anew

A connection is one exchange: the driver opens one for each call. An answer is found by the method and path of its request, in the order of
the recording; the last one of a kind is given again, for how often a running command is asked about differs from run to run (the recording
has the first and the last time).
"""

from __future__ import annotations

import base64
import contextlib
import http
import http.client
import io
import json
import os
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perilune.sandbox import Limits, Result, Sandboxes, Spec
from perilune.sandbox.drivers.docker_engine import Engine

RECORDING = Path(__file__).with_name("docker_recorded.json")
SPEC = Spec(limits=Limits(memory_bytes=128 << 20, disk_bytes=16 << 20, processes=32))
SCRIPT = "cat; echo err >&2; mkdir -p tree/deep; echo text > tree/file; ln tree/file tree/hard; ln -s file tree/link; rm /etc/shells; exit 7"


def life(sandboxes: Sandboxes) -> dict[str, Any]:
    """What was recorded: a sandbox is made, used, saved, made again from its snapshot, and ended."""
    box = sandboxes.create(SPEC, driver="docker")
    result: Result = box.exec(["sh", "-c", SCRIPT], stdin=b"input")
    box.write_file("/workspace/data", bytes(range(256)), mode=0o640)
    told = {"result": result, "data": box.read_file("/workspace/data"), "list": box.list("/workspace")}
    snapshot = box.checkpoint()
    again = sandboxes.resume(snapshot.id)
    told |= {"snapshot": snapshot, "again": again.exec(["cat", "/workspace/tree/hard"]).stdout, "ports": again.ports()}
    again.destroy()
    box.destroy()
    return told


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its answer; `sent` and `said` are their bodies, `said` of an upgraded connection all that came on it."""

    method: str
    target: str
    sent: bytes
    status: int
    headers: dict[str, str]
    said: bytes

    @property
    def kind(self) -> tuple[str, str]:
        """Method, and path without its query."""
        return self.method, self.target.partition("?")[0]

    def answer(self) -> bytes:
        """The answer as it goes over the wire."""
        length = {} if self.status == 101 or self.method == "HEAD" else {"Content-Length": str(len(self.said))}
        head = "".join(f"{name}: {value}\r\n" for name, value in {**self.headers, **length}.items())
        return f"HTTP/1.1 {self.status} {http.HTTPStatus(self.status).phrase}\r\n{head}\r\n".encode() + self.said


def recorded() -> list[Exchange]:
    """The exchanges of the recording."""
    values = json.loads(RECORDING.read_text())["exchanges"]
    return [
        Exchange(**{**one, "sent": base64.b64decode(one["sent"]), "said": base64.b64decode(one["said"])})
        for one in values
    ]


def comparable(body: bytes) -> Any:
    """A JSON body without what is drawn anew for every sandbox."""
    text = re.sub(r"sb[0-9a-f]{12}", "SANDBOX", body.decode())
    text = re.sub(r"\b[0-9a-f]{32}\b", "GENERATION", text)
    return json.loads(re.sub(r'("perilune.home": )"[^"]*"', r'\1"HOME"', text))


class Double:
    """Plays a recording on `path`; `requests` are those that came, in order, each with its head."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "engine.sock"
        self.requests: list[tuple[str, str, bytes]] = []
        self._left: dict[tuple[str, str], list[Exchange]] = {}
        for exchange in recorded():
            self._left.setdefault(exchange.kind, []).append(exchange)
        self._lock = threading.Lock()
        self._listener = _listening(self.path, self._answer)

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            method, target, body = whole_request(connection)[1]
            with self._lock:
                self.requests.append((method, target, body))
                found = self._left.get((method, target.partition("?")[0]), [UNKNOWN])
                exchange = found.pop(0) if len(found) > 1 else found[0]
            connection.sendall(exchange.answer())
            if exchange.status == 101:
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):  # The command's input, which the recorded one has had.
                    pass

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()


UNKNOWN = Exchange("", "", b"", 404, {}, b'{"message": "this is not in the recording"}')


def _listening(path: Path, answer: Callable[[socket.socket], None]) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(16)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return listener


def whole_request(connection: socket.socket) -> tuple[bytes, tuple[str, str, bytes]]:
    """A request as it is, and its method, target and body."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head = data.partition(b"\r\n\r\n")[0]
    found = re.search(rb"(?i)content-length: (\d+)", head)
    length = len(head) + 4 + (int(found[1]) if found else 0)
    while len(data) < length:
        data += connection.recv(65536)
    method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
    return data, (method, target, data[len(head) + 4 :])


# Recording


def record(engine: str, folder: Path) -> list[Exchange]:
    """Live the life at an engine, through a socket that passes everything on and notes it."""
    raw: list[tuple[tuple[str, str, bytes], bytearray]] = []

    def one(client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        server.connect(engine)
        data, request = whole_request(client)
        said = bytearray()
        raw.append((request, said))
        server.sendall(data)

        def upwards() -> None:
            while data := client.recv(65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

        threading.Thread(target=upwards, daemon=True).start()
        with client:
            while data := server.recv(65536):
                said += data
                client.sendall(data)

    listener = _listening(folder / "proxy.sock", one)
    os.environ["DOCKER_HOST"] = f"unix://{folder}/proxy.sock"
    with Sandboxes(folder / "home", sync="none") as sandboxes:
        sandboxes.create(SPEC, driver="docker").destroy()  # The small image is made.
    raw.clear()
    with Sandboxes(folder / "home", sync="none") as sandboxes:
        life(sandboxes)
    listener.close()
    root = Engine(engine).json("GET", "/info")["DockerRootDir"]
    exchanges = [_noted(request, bytes(said), root) for request, said in raw]
    asked = [exchange.target for exchange in exchanges]
    last = {target: number for number, target in enumerate(asked)}
    return [
        exchange
        for number, exchange in enumerate(exchanges)
        if not exchange.target.startswith("/exec/") or number in (asked.index(exchange.target), last[exchange.target])
    ]


def _noted(request: tuple[str, str, bytes], said: bytes, root: str) -> Exchange:
    """Without what is the recording machine's: where its engine keeps its files, its kernel, dates."""
    method, target, sent = request
    status = int(said.split(b" ", 2)[1])
    if status == 101:
        return Exchange(
            method, target, sent, status, {"Connection": "Upgrade", "Upgrade": "tcp"}, said.partition(b"\r\n\r\n")[2]
        )
    answer = http.client.HTTPResponse(_Said(said), method=method)  # type: ignore[arg-type]
    answer.begin()
    kept = {
        name: value
        for name, value in answer.getheaders()
        if name in ("Api-Version", "Content-Type", "X-Docker-Container-Path-Stat")
    }
    body = answer.read()
    if kept.get("Content-Type") == "application/json":
        body = body.replace(root.encode(), b"/var/lib/docker")
        body = re.sub(rb'("KernelVersion": ?)"[^"]*"', rb'\1"6.1.0"', body)
        body = re.sub(rb'("SandboxKey": ?")[^"]*(/netns/)', rb"\1/var/run/docker\2", body)
    return Exchange(method, target, sent, status, kept, body)


class _Said:
    """What `http.client` wants of a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        values = [
            asdict(one) | {"sent": base64.b64encode(one.sent).decode(), "said": base64.b64encode(one.said).decode()}
            for one in record(sys.argv[1], Path(name))
        ]
    RECORDING.write_text(json.dumps({"of": "Docker Engine API", "exchanges": values}, indent=0) + "\n")
