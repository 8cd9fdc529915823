"""A double of Firecracker for tests: its API on a Unix socket with its rules and refusals, its snapshot files, and a guest with an agent.

The calls and answers are those of the API of release 1.x (`firecracker.yaml`): 204 without a body where a call succeeds, 400 with a
`fault_message` where it does not; a snapshot only of a paused machine, a diff only where dirty pages are tracked, loading only into a fresh
process. The guest is a program's memory of files, kept in its "RAM" so that only what a snapshot holds survives.

    python firecracker_double.py LOG --api-sock api.sock --id NAME
"""

from __future__ import annotations

import json
import os
import random
import socket
import socketserver
import struct
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

PAGE, STATE_AT = 4096, 1 << 20
HEADER = struct.Struct("<III")


class Machine:
    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.state = "Not started"
        self.memory, self.dirty = bytearray(), set()
        self.files: dict[str, str] = {}

    def remember(self) -> None:
        """Write the guest's files into its memory."""
        text = json.dumps(self.files).encode()
        data = struct.pack("<I", len(text)) + text
        self.write(STATE_AT, data)

    def write(self, at: int, data: bytes) -> None:
        self.memory[at : at + len(data)] = data
        self.dirty |= set(range(at // PAGE, (at + len(data) - 1) // PAGE + 1))

    def recall(self) -> None:
        size = struct.unpack_from("<I", self.memory, STATE_AT)[0]
        self.files = json.loads(bytes(self.memory[STATE_AT + 4 : STATE_AT + 4 + size]))


MACHINE = Machine()


class Refused(Exception):
    pass


def call(method: str, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
    started = MACHINE.state != "Not started"
    if (method, path) == ("GET", "/version"):
        return {"firecracker_version": "1.7.0"}
    if method == "PUT" and path in ("/machine-config", "/boot-source", "/vsock", "/entropy"):
        if started:
            raise Refused("The requested operation is not supported after starting the microVM.")
        MACHINE.config[path] = body
    elif (method, path) == ("PUT", "/actions"):
        if "/boot-source" not in MACHINE.config:
            raise Refused("Cannot start microvm without kernel configuration.")
        MACHINE.memory = bytearray(MACHINE.config["/machine-config"]["mem_size_mib"] << 20)
        MACHINE.write(8 << 20, os.urandom(40 * PAGE))  # A kernel.
        MACHINE.remember()
        MACHINE.state = "Running"
        threading.Thread(target=serve_agent, daemon=True).start()
    elif (method, path) == ("PATCH", "/vm"):
        if not started:
            raise Refused("The requested operation is not supported before starting the microVM.")
        MACHINE.state = {"Paused": "Paused", "Resumed": "Running"}[body["state"]]
    elif (method, path) == ("PUT", "/snapshot/create"):
        create(body)
    elif (method, path) == ("PUT", "/snapshot/load"):
        if started or MACHINE.config:
            raise Refused("Loading a microVM snapshot not allowed after configuring boot-specific resources.")
        load(body)
    else:
        raise Refused(f"Invalid request method and/or path: {method} {path}.")
    return None


def create(body: dict[str, Any]) -> None:
    if MACHINE.state != "Paused":
        raise Refused("Cannot save the microVM state: save operation is only allowed on a paused microVM.")
    if body["snapshot_type"] == "Diff" and not MACHINE.config["/machine-config"].get("track_dirty_pages"):
        raise Refused("Diff snapshots are not allowed on uVMs with dirty page tracking disabled.")
    MACHINE.remember()
    Path(body["snapshot_path"]).write_text(json.dumps(MACHINE.config))
    with open(body["mem_file_path"], "wb") as file:
        file.truncate(len(MACHINE.memory))
        pages = range(len(MACHINE.memory) // PAGE) if body["snapshot_type"] == "Full" else sorted(MACHINE.dirty)
        for page in pages:
            data = MACHINE.memory[page * PAGE : (page + 1) * PAGE]
            if body["snapshot_type"] == "Diff" or data != bytes(PAGE):
                os.pwrite(file.fileno(), data, page * PAGE)
    MACHINE.dirty.clear()


def load(body: dict[str, Any]) -> None:
    MACHINE.config = json.loads(Path(body["snapshot_path"]).read_text())
    MACHINE.config["/machine-config"]["track_dirty_pages"] = body.get("enable_diff_snapshots", False)
    path = body["mem_backend"]["backend_path"]
    MACHINE.memory = bytearray(os.path.getsize(path))
    with open(path, "rb") as file:
        file.readinto(MACHINE.memory)
    MACHINE.recall()
    MACHINE.state = "Running" if body.get("resume_vm") else "Paused"
    threading.Thread(target=serve_agent, daemon=True).start()


def serve_agent() -> None:
    """The vsock device's socket: a line that names the port, an answer, then the guest's agent."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(MACHINE.config["/vsock"]["uds_path"])
    listener.listen()
    while True:
        sock, _ = listener.accept()
        line = b""
        while not line.endswith(b"\n"):
            line += sock.recv(1)
        if line != b"CONNECT 1024\n":
            sock.close()
            continue
        sock.sendall(b"OK 1073741824\n")
        threading.Thread(target=agent, args=(sock,), daemon=True).start()


def agent(sock: socket.socket) -> None:
    inputs: dict[int, tuple[list[str], bytearray]] = {}
    numbers = random.Random(0)
    file = sock.makefile("rb")

    def send(kind: int, number: int, body: bytes) -> None:
        sock.sendall(HEADER.pack(len(body), number, kind) + body)

    while header := file.read(HEADER.size):
        length, number, kind = HEADER.unpack(header)
        body = file.read(length)
        if MACHINE.state != "Running":
            raise AssertionError("a message to a machine that stands still")
        if kind == 1:  # HELLO
            numbers = random.Random(body[40:104])
            send(65, 0, body[:32])
        elif kind == 2:  # START
            count = struct.unpack_from("<I", body, 12)[0]
            inputs[number] = [part.decode() for part in body[24:].split(b"\0")[1 : 1 + count]], bytearray()
        elif kind == 3:  # INPUT
            inputs[number][1].extend(body)
            send(69, number, struct.pack("<I", len(body)))
        elif kind == 4:  # INPUT_END
            argv, data = inputs.pop(number)
            code, out, err = run(argv, bytes(data), numbers)
            if out:
                send(66, number, out)
            if err:
                send(67, number, err)
            send(68, number, struct.pack("<iiQQI", code, 0, 10, 4096, 0))
        elif kind == 7:  # QUIESCE
            send(70, 0, struct.pack("<I", 1))


def run(argv: list[str], data: bytes, numbers: random.Random) -> tuple[int, bytes, bytes]:
    if argv[0] == "write":
        MACHINE.files[argv[1]] = data.hex()
        MACHINE.remember()
        return 0, b"", b""
    if argv[0] == "read":
        found = MACHINE.files.get(argv[1])
        return (1, b"", b"No such file or directory") if found is None else (0, bytes.fromhex(found), b"")
    if argv[0] == "dirty":
        MACHINE.write(16 << 20, os.urandom(int(argv[1]) * PAGE))
        return 0, b"", b""
    if argv[0] == "uuid":
        return 0, f"{numbers.getrandbits(128):032x}".encode(), b""
    return 0, data, b""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(data) if data else {}
        with open(sys.argv[1], "a") as log:
            log.write(json.dumps([self.command, self.path, body]) + "\n")
        try:
            found = call(self.command, self.path, body)
            status, text = (204, b"") if found is None else (200, json.dumps(found).encode())
        except Refused as error:
            status, text = 400, json.dumps({"fault_message": str(error)}).encode()
        self.send_response(status)
        self.send_header("Server", "Firecracker API")
        if text:
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PUT = do_PATCH = _answer

    def address_string(self) -> str:
        return "local"


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


if __name__ == "__main__":
    if "--version" in sys.argv:
        print("Firecracker v1.7.0")
    else:
        Server(sys.argv[sys.argv.index("--api-sock") + 1], Handler).serve_forever()
