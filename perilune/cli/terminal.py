"""Relay between this terminal and a program's pseudo-terminal elsewhere."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Mapping
from typing import Any, Protocol

PIECE = 65536


class OnTerminal(Protocol):
    """A program on a pseudo-terminal: `terminal` is its master's descriptor."""

    terminal: int

    def status_fd(self) -> int: ...
    def finish(self) -> Mapping[str, Any]: ...


def relay(process: OnTerminal) -> Mapping[str, Any]:
    """Pass keys, output and window size until the program ends; returns its `finish()`. stdin must be a terminal."""
    stdin, master = sys.stdin.fileno(), process.terminal
    before = termios.tcgetattr(stdin)

    def resize(number: int = 0, frame: object = None) -> None:
        with contextlib.suppress(OSError):
            fcntl.ioctl(master, termios.TIOCSWINSZ, fcntl.ioctl(stdin, termios.TIOCGWINSZ, b"\0" * 8))

    resize()
    old_handler = signal.signal(signal.SIGWINCH, resize)
    tty.setraw(stdin)
    try:
        poll = select.poll()
        for fd in (stdin, master, process.status_fd()):
            poll.register(fd, select.POLLIN)
        ended = False
        while not ended:
            for fd, _ in poll.poll():
                if fd == stdin:
                    data = os.read(stdin, PIECE)
                    os.write(master, data or b"\x04")
                elif fd == master:
                    if not _show(master):
                        poll.unregister(master)
                else:
                    ended = True
        while select.select([master], [], [], 0)[0] and _show(master):
            pass
        return process.finish()
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
        signal.signal(signal.SIGWINCH, old_handler)


def _show(master: int) -> bool:
    try:
        data = os.read(master, PIECE)
    except OSError:  # EIO: no program holds the other end.
        return False
    view = memoryview(data)
    while view:
        view = view[os.write(sys.stdout.fileno(), view) :]
    return bool(data)
