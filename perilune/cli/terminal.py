"""Relay between this terminal and a program's pseudo-terminal elsewhere."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

PIECE = 65536


class OnTerminal(Protocol):
    """A program on a pseudo-terminal: keys go into the descriptor `terminal`, what it shows comes from there."""

    terminal: int

    def status_fd(self) -> int: ...
    def resize(self, rows: int, columns: int) -> None: ...
    def finish(self) -> Mapping[str, Any]: ...


def relay(process: OnTerminal) -> Mapping[str, Any]:
    """Pass keys, output and window size until the program ends; returns its `finish()`. stdin must be a terminal."""
    stdin, master = sys.stdin.fileno(), process.terminal
    with _raw(stdin), _resized() as changed:
        poll = select.poll()
        for fd in (stdin, master, process.status_fd(), changed):
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
                elif fd == changed:
                    os.read(changed, PIECE)
                    with contextlib.suppress(OSError):  # It ends just now; its size is of no matter then.
                        process.resize(*window(stdin))
                else:
                    ended = True
        while select.select([master], [], [], 0)[0] and _show(master):
            pass
        return process.finish()


def window(fd: int) -> tuple[int, int]:
    """Rows and columns of a terminal; the usual 24 and 80 for one that does not know."""
    columns, rows = os.get_terminal_size(fd)
    return rows or 24, columns or 80


@contextlib.contextmanager
def _raw(stdin: int) -> Iterator[None]:
    before = termios.tcgetattr(stdin)
    tty.setraw(stdin)
    try:
        yield
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resized() -> Iterator[int]:
    """A descriptor that is readable after the window's size has changed.

    The size is passed on in the loop and not in the signal's handler, for that may be a request to a service.
    """
    changed, tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def told(number: int, frame: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(tell, b"r")

    before = signal.signal(signal.SIGWINCH, told)
    told(0, None)  # It may have changed since the program was started with a size.
    try:
        yield changed
    finally:
        signal.signal(signal.SIGWINCH, before)
        os.close(changed)
        os.close(tell)


def _show(master: int) -> bool:
    try:
        data = os.read(master, PIECE)
    except OSError:  # EIO: no program holds the other end.
        return False
    view = memoryview(data)
    while view:
        view = view[os.write(sys.stdout.fileno(), view) :]
    return bool(data)
