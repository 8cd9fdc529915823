"""A command of a `proc` guest from the host's side: its pipes, and the agent's word on how it ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Mapping, Sequence
from typing import Any

from perilune.errors import SandboxError
from perilune.sandbox.guest import wire
from perilune.sandbox.protocol import GuestLost

CALL_SECONDS = 30.0
"""Time limit of every call to the fork server or to an agent; one that does not answer is ended."""


def set_window(terminal: int, rows: int, columns: int) -> None:
    """Give a pseudo-terminal a window of this size; the kernel tells the programs on it."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


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

    def resize(self, rows: int, columns: int) -> None:
        """See `protocol.Process`."""
        set_window(self.terminal, rows, columns)

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
