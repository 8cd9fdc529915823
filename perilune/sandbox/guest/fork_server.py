"""The loop of a fork server: a small single-threaded process that starts others on request, and ends with its owner.

Its owner's side is `drivers/fork_server.py`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator
from typing import Any

from perilune.sandbox.guest import wire

ORPHAN_CHECK_MS = 1000
"""How often it looks whether its owner is still its parent; the closed socket tells it at once, as a rule."""


def requests(sock: socket.socket) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Requests with their descriptors (the caller's to close), until the other end closes or the owner is gone.

    Raises:
        wire.Malformed: the owner sent no message.
    """
    owner = os.getppid()
    # Nobody waits for what it starts; pidfds tell of their end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while True:
        if not poll.poll(ORPHAN_CHECK_MS):
            if os.getppid() != owner:
                return
            continue
        message = wire.receive(sock)
        if message is None:
            return
        yield message
