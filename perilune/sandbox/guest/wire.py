"""Messages between host and guest over a Unix `SOCK_SEQPACKET` socket: one JSON object and file descriptors.

A message that is too long for a packet travels in a memory file whose descriptor comes first.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

INLINE = 16384
"""Bytes of JSON that are sent in the packet itself."""
LONGEST = 64 << 20
"""Bytes of JSON that a receiver accepts."""
MOST_FDS = 8


class Malformed(ValueError):
    """The other side sent something that is no message."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets for messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message; the descriptors stay open here. Raises OSError when the other side is gone."""
    body = json.dumps(message).encode()
    memory = -1
    try:
        packet = b"i" + body
        if len(body) > INLINE:
            memory = os.memfd_create("message")
            with open(memory, "wb", closefd=False) as file:
                file.write(body)
            packet, fds = b"m", [memory, *fds]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sock.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
    finally:
        if memory >= 0:
            os.close(memory)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message with its descriptors (the caller's to close), or None at the end.

    Raises:
        Malformed: not a message; descriptors that came with it are closed.
    """
    room = socket.CMSG_SPACE((MOST_FDS + 1) * 4)
    data, ancillary, flags, _ = sock.recvmsg(INLINE + 2, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if not data and not fds:
        return None
    owned = list(fds)
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise Malformed("a message was cut off")
        body = data[1:]
        if data[:1] == b"m":
            if not owned:
                raise Malformed("a message in a memory file came without the file")
            memory = owned.pop(0)
            try:
                if os.fstat(memory).st_size > LONGEST:
                    raise Malformed("a message is too long")
                body = os.pread(memory, LONGEST, 0)
            finally:
                os.close(memory)
        elif data[:1] != b"i":
            raise Malformed(f"a message starts with {data[:1]!r}")
        message = json.loads(body)
        if not isinstance(message, dict):
            raise Malformed("a message is not an object")
        return message, owned
    except (ValueError, RecursionError, OSError) as error:
        for fd in owned:
            with contextlib.suppress(OSError):
                os.close(fd)
        raise error if isinstance(error, Malformed) else Malformed(f"a message is not JSON: {error}") from error
