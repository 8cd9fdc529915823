"""A command in a guest with an agent, from the host's side: pipes for its owner, and the other ends for the channel's thread."""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import pty
import select
import socket
import struct
import termios
import time
import tty
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perilune.errors import SandboxError
from perilune.sandbox.drivers.proc_process import set_window
from perilune.sandbox.protocol import GuestLost

if TYPE_CHECKING:
    from perilune.sandbox.drivers.agent_channel import Channel


class Kind(enum.IntEnum):
    """Kinds of frames; the numbers of `guest/vm/agent.h`."""

    HELLO = 1
    START = 2
    INPUT = 3
    INPUT_END = 4
    KILL = 5
    CREDIT = 6
    QUIESCE = 7
    RESUME = 8
    PAD = 9
    WINDOW_SIZE = 10
    READY = 65
    OUTPUT = 66
    ERRORS = 67
    EXITED = 68
    CONSUMED = 69
    QUIESCED = 70


START, CREDIT, OUTPUT, ERRORS, EXITED = Kind.START, Kind.CREDIT, Kind.OUTPUT, Kind.ERRORS, Kind.EXITED
HEADER = struct.Struct("<III")
"""Length of the body, command, kind."""
WINDOW = 256 << 10
PIECE = 32768
LONGEST_START = 4 << 20
CALL_SECONDS = 30.0
_TERMINAL, _FILE_COMMAND = 1, 2


def encode_start(argv: Sequence[str], env: Mapping[str, str], cwd: str, terminal: bool, file_command: bool) -> bytes:
    """Body of a START frame. Raises SandboxError for one that is too long."""
    variables = [f"{name}={value}" for name, value in env.items()]
    flags = _TERMINAL * terminal | _FILE_COMMAND * file_command
    text = b"".join(os.fsencode(part) + b"\0" for part in (cwd, *argv, *variables))
    if len(text) > LONGEST_START - 64:
        raise SandboxError(f"arguments and environment of {len(text)} bytes; at most {LONGEST_START - 64} fit")
    return struct.pack("<QIIIHH", time.time_ns(), flags, len(argv), len(variables), 24, 80) + text


class AgentCommand:
    """A started command; a `protocol.Process` for its owner.

    Attributes:
        stdin, stdout, stderr, terminal: the owner's ends.
        room: bytes of input that the agent takes now.
        owed: consumed output of each stream that the agent has not been told of.
        result: what became of it, once it has ended and all its output is in its pipes.
        left: its owner has closed it: its output is dropped.
        released: its owner has its streams and asks for no result.
        to_kill, killed: it is to be killed as soon as messages may be sent; the agent has been told.
    """

    def __init__(self, channel: Channel, number: int, terminal: bool, streams: socket.socket | None) -> None:
        self.channel, self.number = channel, number
        self.room, self.owed = WINDOW, {OUTPUT: 0, ERRORS: 0}
        self.result: Mapping[str, Any] | None = None
        self.left = self.released = self.to_kill = self.killed = self.lost = False
        self.stdin = self.stdout = self.stderr = self.terminal = -1
        self._done: Mapping[str, Any] | None = None
        self._waiting = {OUTPUT: bytearray(), ERRORS: bytearray()}
        self._status = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._window = b""
        self._input = -1
        self._output = {OUTPUT: -1, ERRORS: -1}
        if terminal:
            self.terminal, slave = pty.openpty()
            tty.setraw(slave)
            self._input = self._output[OUTPUT] = slave
        elif streams is not None:
            self._input, self._output[OUTPUT] = os.dup(streams.fileno()), os.dup(streams.fileno())
            self.stderr, self._output[ERRORS] = os.pipe()
        else:
            self._input, self.stdin = os.pipe()
            self.stdout, self._output[OUTPUT] = os.pipe()
            self.stderr, self._output[ERRORS] = os.pipe()
        for fd in (self._input, *self._output.values()):
            if fd >= 0:
                os.set_blocking(fd, False)

    # The owner's side.

    def status_fd(self) -> int:
        """See `protocol.Process`."""
        return self._status

    def finish(self) -> Mapping[str, Any]:
        """See `protocol.Process`."""
        select.select([self._status], [], [], CALL_SECONDS)
        if self.result is None:
            what = "the guest ended while a command ran" if self.lost else "its agent does not say that a command ended"
            raise GuestLost(f"sandbox {self.channel.sandbox}: {what}")
        return self.result

    def resize(self, rows: int, columns: int) -> None:
        """See `protocol.Process`; the channel's thread sees the new size and passes it on."""
        set_window(self.terminal, rows, columns)

    def kill(self) -> None:
        """See `protocol.Process`."""
        self.channel.kill(self)

    def close(self) -> None:
        """See `protocol.Process`."""
        for name in ("stdin", "stdout", "stderr", "terminal"):
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)
        self.channel.forget(self)
        if self._status >= 0 and (self.result is not None or self.lost):
            os.close(self._status)
            self._status = -1

    def release(self) -> None:
        """Leave it to itself: it ends with its streams, and nobody waits for it."""
        os.close(self.stderr)
        self.stderr = -1
        with self.channel.locked():
            self.released = True
            if self.result is not None or self.lost:
                self._tell()

    # The channel's side; its lock is held.

    def wanted(self, channel: Channel, may_send: bool) -> dict[int, tuple[int, Callable[[int], None]]]:
        """Descriptors to wait for now."""
        found: dict[int, tuple[int, Callable[[int], None]]] = {}
        if self.terminal >= 0:
            self._look_at_window(channel)
        if may_send and self._input >= 0 and self.room > 0 and self._done is None:
            found[self._input] = (select.POLLIN, lambda events: self._read_input(channel))
        for kind, waiting in self._waiting.items():
            fd = self._output[kind]
            if waiting and fd >= 0:
                events, handler = found.get(fd, (0, None))

                def write(ready: int, kind: Kind = kind, handler: Callable[[int], None] | None = handler) -> None:
                    if handler is not None and ready & ~select.POLLOUT:
                        handler(ready)
                    if ready & ~select.POLLIN:
                        channel.credit(self, kind, self._write(kind))
                        self._finish_if_flushed()

                found[fd] = (events | select.POLLOUT, write)
        if self.released and not self.to_kill and self._output[OUTPUT] >= 0:
            found.setdefault(self._output[OUTPUT], (0, lambda events: channel.kill(self)))  # Its other end was closed.
        return found

    def _read_input(self, channel: Channel) -> None:
        if self._input < 0:
            return
        try:
            data = os.read(self._input, min(PIECE, self.room))
        except BlockingIOError:
            return
        except OSError:  # The owner's end of a terminal or a socket is gone.
            data = b""
        self.room -= len(data)
        channel.input(self, data)
        if not data:
            self._close_input()

    def _close_input(self) -> None:
        if self._input >= 0 and self._input != self._output[OUTPUT]:
            os.close(self._input)
        self._input = -1

    def _look_at_window(self, channel: Channel) -> None:
        size = fcntl.ioctl(self._output[OUTPUT], termios.TIOCGWINSZ, bytes(8)) if self._output[OUTPUT] >= 0 else b""
        if size and size != self._window and size[:4] != bytes(4):
            self._window = size
            channel.resize(self, *struct.unpack("HH", size[:4]))

    def take(self, kind: int, data: bytes) -> int:
        """Output has come; returns how much of what waited has gone into the owner's pipe."""
        key = Kind(kind)
        if self.left or self._output[key] < 0:
            return len(data)
        self._waiting[key] += data
        return self._write(key)

    def _write(self, kind: Kind) -> int:
        waiting, gone = self._waiting[kind], 0
        try:
            while waiting:
                count = os.write(self._output[kind], memoryview(waiting)[: 2 * PIECE].tobytes())
                del waiting[:count]
                gone += count
        except BlockingIOError:
            pass
        except OSError:  # The owner reads no more.
            gone += len(waiting)
            waiting.clear()
        return gone

    def exited(self, done: Mapping[str, Any]) -> None:
        """The agent says that it has ended; its owner learns of it when its output has gone on."""
        self._done = done
        self._close_input()
        self._finish_if_flushed()

    def _finish_if_flushed(self) -> None:
        if self._done is not None and self.result is None and not any(self._waiting.values()):
            self.result = self._done
            self.close_ends()
            self._tell()

    def lose(self) -> None:
        """The guest has ended."""
        self.lost = True
        self.close_ends()
        self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(OSError):
            if self._status >= 0:
                os.eventfd_write(self._status, 1)
        if self.left or self.released:
            self.channel.drop(self)
            if self._status >= 0:
                os.close(self._status)
                self._status = -1

    def close_ends(self) -> None:
        """Close the channel's ends, so that the owner sees the end of its streams."""
        self._close_input()
        for kind, fd in self._output.items():
            if fd >= 0:
                os.close(fd)
                self._output[kind] = -1
