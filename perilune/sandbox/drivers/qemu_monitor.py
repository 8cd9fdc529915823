"""QEMU's control socket (QMP): one command at a time, each within a time limit, descriptors passed along."""

from __future__ import annotations

import array
import json
import os
import socket
import threading
import time
from typing import Any

from perilune.errors import SandboxError
from perilune.sandbox.protocol import GuestLost

CALL_SECONDS = 30.0
LONGEST_LINE = 1 << 20


class MonitorError(SandboxError):
    """QEMU refused a command; the message holds what it said."""


class Monitor:
    """The owner's end of the control socket; safe from several threads.

    Args:
        sandbox: for messages.
        sock: connected; QEMU has the other end.

    Raises:
        GuestLost: QEMU ended or did not greet in time.
    """

    def __init__(self, sandbox: str, sock: socket.socket) -> None:
        self.sandbox, self.sock = sandbox, sock
        self._buffer = b""
        self._lock = threading.Lock()
        self.version = self._greeted()
        self.execute("qmp_capabilities")

    def _greeted(self) -> str:
        version = self._message(time.monotonic() + CALL_SECONDS)["QMP"]["version"]["qemu"]
        return f"{version['major']}.{version['minor']}.{version['micro']}"

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            self.sock.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self.sock.recv(65536)
            except OSError as error:
                raise GuestLost(f"sandbox {self.sandbox}: QEMU does not answer: {error}") from error
            if not data or len(self._buffer) > LONGEST_LINE:
                raise GuestLost(f"sandbox {self.sandbox}: QEMU has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def execute(self, command: str, *, fd: int = -1, seconds: float = CALL_SECONDS, **arguments: Any) -> Any:
        """Do a command; returns its answer. Events that come in between are dropped.

        Args:
            fd: a descriptor that goes with it; it stays open here.
            seconds: time limit.

        Raises:
            MonitorError: QEMU refused.
            GuestLost: it ended, or did not answer in time.
        """
        text = json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n"
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        deadline = time.monotonic() + seconds
        with self._lock:
            try:
                self.sock.settimeout(seconds)
                self.sock.sendmsg([text], rights)
            except OSError as error:
                raise GuestLost(f"sandbox {self.sandbox}: QEMU has ended: {error}") from error
            while True:
                message = self._message(deadline)
                if "error" in message:
                    raise MonitorError(
                        f"sandbox {self.sandbox}: QEMU refuses {command}: {message['error'].get('desc')}"
                    )
                if "return" in message:
                    return message["return"]

    def save_devices(self) -> bytes:
        """The state of processor and devices; the machine must stand still."""
        memory = os.memfd_create("devices")
        try:
            # QEMU takes a descriptor for writing only where it is opened so.
            writing = os.open(f"/proc/self/fd/{memory}", os.O_WRONLY)
            try:
                number = self.execute("add-fd", fd=writing)["fdset-id"]
            finally:
                os.close(writing)
            try:
                self.execute("xen-save-devices-state", filename=f"/dev/fdset/{number}")
            finally:
                self.execute("remove-fd", **{"fdset-id": number})
            return os.pread(memory, os.fstat(memory).st_size, 0)
        finally:
            os.close(memory)

    def load_devices(self, state: bytes) -> None:
        """Load what `save_devices` gave into a machine that waits for it; it runs afterwards."""
        memory = os.memfd_create("devices")
        try:
            os.write(memory, state)
            os.lseek(memory, 0, os.SEEK_SET)
            self.execute("getfd", fd=memory, fdname="devices")
            self.execute("migrate-incoming", uri="fd:devices")
        finally:
            os.close(memory)
        deadline = time.monotonic() + CALL_SECONDS
        while (status := self.execute("query-status")["status"]) != "running":
            if status not in ("inmigrate", "paused", "prelaunch") or time.monotonic() > deadline:
                raise GuestLost(f"sandbox {self.sandbox}: its device state leads to status {status!r}")
            time.sleep(0.001)

    def close(self) -> None:
        """Close the socket; QEMU goes on."""
        self.sock.close()
