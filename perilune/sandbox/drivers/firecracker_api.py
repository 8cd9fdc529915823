"""Firecracker's REST API over its Unix socket: the calls that this package uses, each within a time limit, refusals as errors.

Source: the project's `firecracker.yaml` (API of release 1.x) and its documents on snapshots and vsock.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from perilune.errors import SandboxError
from perilune.sandbox.protocol import GuestLost

CALL_SECONDS = 30.0
SOCKET, AGENT_SOCKET = "api.sock", "agent.sock"
"""Names in the folder of a process. The second is part of a machine's saved state: relative, so that each copy has its own."""


class FirecrackerError(SandboxError):
    """Firecracker refused a call; the message holds its `fault_message`."""


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = dial(self._path, self.timeout or CALL_SECONDS)


def dial(path: Path, seconds: float) -> socket.socket:
    """Connect to a Unix socket; its path may be longer than the 107 bytes that an address holds."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(seconds)
        sock.connect(f"/proc/self/fd/{folder}/{path.name}")
        return sock
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(folder)


class Api:
    """Calls to one Firecracker process.

    Args:
        sandbox: for messages.
        folder: where the process runs and has its sockets.
    """

    def __init__(self, sandbox: str, folder: Path) -> None:
        self.sandbox, self.folder = sandbox, folder

    def wait(self, alive: Any, seconds: float = CALL_SECONDS) -> str:
        """Until it answers; returns its version. Raises GuestLost if it ends or takes longer."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return str(self.call("GET", "/version")["firecracker_version"])
            except GuestLost:
                if not alive() or time.monotonic() > deadline:
                    raise
                time.sleep(0.002)

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, seconds: float = CALL_SECONDS
    ) -> dict[str, Any]:
        """One call; returns its answer, {} where it has none.

        Raises:
            FirecrackerError: it was refused.
            GuestLost: the process has ended or does not answer.
        """
        connection = _Connection(self.folder / SOCKET, seconds)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json", "Accept": "application/json"})
            response = connection.getresponse()
            data = response.read()
            answer = json.loads(data) if data else {}
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise GuestLost(f"sandbox {self.sandbox}: Firecracker does not answer {method} {path}: {error}") from error
        finally:
            connection.close()
        if response.status >= 300:
            raise FirecrackerError(
                f"sandbox {self.sandbox}: Firecracker refuses {method} {path}: {answer.get('fault_message', response.status)}"
            )
        return answer

    def boot(self, kernel: str, initrd: str, line: str, memory: int) -> None:
        """Configure and start a machine with one processor and no device but the agent's socket and a source of randomness."""
        self.call("PUT", "/machine-config", {"vcpu_count": 1, "mem_size_mib": memory >> 20, "track_dirty_pages": True})
        self.call("PUT", "/boot-source", {"kernel_image_path": kernel, "initrd_path": initrd, "boot_args": line})
        self.call("PUT", "/vsock", {"guest_cid": 3, "uds_path": AGENT_SOCKET})
        self.call("PUT", "/entropy", {})
        self.call("PUT", "/actions", {"action_type": "InstanceStart"})

    def pause(self) -> None:
        """Stop the processor."""
        self.call("PATCH", "/vm", {"state": "Paused"})

    def resume(self) -> None:
        """Let it go on."""
        self.call("PATCH", "/vm", {"state": "Resumed"})

    def save(self, devices: Path, memory: Path, *, whole: bool) -> None:
        """Write the state of a paused machine: devices, and its memory or (not `whole`) the pages that were written since the last time."""
        kind = "Full" if whole else "Diff"
        self.call(
            "PUT",
            "/snapshot/create",
            {"snapshot_type": kind, "snapshot_path": str(devices), "mem_file_path": str(memory)},
        )

    def load(self, devices: Path, memory: Path) -> None:
        """Go on from a saved state, the memory file mapped privately; the machine runs afterwards."""
        backend = {"backend_type": "File", "backend_path": str(memory)}
        self.call(
            "PUT", "/snapshot/load",
            {"snapshot_path": str(devices), "mem_backend": backend, "enable_diff_snapshots": True, "resume_vm": True},
        )  # fmt: skip

    def agent(self, port: int) -> socket.socket:
        """Connect to a port that the guest listens on. Raises GuestLost."""
        try:
            sock = dial(self.folder / AGENT_SOCKET, CALL_SECONDS)
            try:
                sock.sendall(f"CONNECT {port}\n".encode())
                line = b""
                while not line.endswith(b"\n"):
                    byte = sock.recv(1)
                    if not byte:
                        raise ConnectionResetError("nobody listens there")
                    line += byte
                if not line.startswith(b"OK "):
                    raise ConnectionResetError(line.decode(errors="replace"))
                return sock
            except BaseException:
                sock.close()
                raise
        except OSError as error:
            raise GuestLost(f"sandbox {self.sandbox}: no connection to its agent: {error}") from error
