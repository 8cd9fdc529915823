"""The host's end of a guest's agent: frames over one socket, and a thread that passes commands' streams to and from pipes.

The frames are those of `guest/vm/agent.h`. What a command wrote is in its pipes before its status becomes readable, so that whoever waits
for the status finds all of it there. While the machine is saved nothing is on its way in either direction (`quiesce`).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from perilune.errors import SandboxError
from perilune.sandbox.drivers.agent_command import (
    CREDIT,
    ERRORS,
    EXITED,
    HEADER,
    OUTPUT,
    START,
    WINDOW,
    AgentCommand,
    Kind,
    encode_start,
)  # fmt: skip
from perilune.sandbox.protocol import GuestLost

CALL_SECONDS = 30.0
PIECE = 32768
AHEAD = 1 << 20
"""Bytes that wait for the socket before commands' input is left in its pipes."""
PADDING = 5 << 20
"""Bytes that overwrite every buffer on the way to the agent: the port's queue has 1024 of 4 KiB."""


class Channel:
    """Connection to the agent of one life of a guest.

    Args:
        sandbox: for messages.
        sock: connected to the guest's port.
    """

    def __init__(self, sandbox: str, sock: socket.socket) -> None:
        self.sandbox, self.sock = sandbox, sock
        self.out_of_memory_kills = 0
        self._commands: dict[int, AgentCommand] = {}
        self._number = 0
        self._arriving, self._leaving = bytearray(), bytearray()
        self._answers: dict[int, bytes] = {}
        self._changed = threading.Condition(threading.RLock())
        self._holding = self._ended = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        sock.setblocking(False)
        self._thread = threading.Thread(target=self._pump, name=f"agent of {sandbox}", daemon=True)
        self._thread.start()

    def hello(
        self, generation: str, seed: bytes, limits: Mapping[str, int], hostname: str, seconds: float = CALL_SECONDS
    ) -> None:
        """Begin a life: the guest takes on randomness, clock, names and limits, and forgets who spoke to it before.

        Raises:
            GuestLost: no answer in time, or one of another generation.
        """
        body = struct.pack(
            "<32sQ64sQII", generation.encode(), time.time_ns(), seed, limits["disk_bytes"], limits["processes"], limits["open_files"]
        )  # fmt: skip
        answer = self._ask(Kind.HELLO, body + hostname.encode()[:63], Kind.READY, seconds)
        if answer.decode(errors="replace") != generation:
            raise GuestLost(f"sandbox {self.sandbox}: another generation answered")

    def quiesce(self, overwrite: bool) -> int:
        """Have the guest's processes stopped and nothing on its way; returns how many processes there are.

        Args:
            overwrite: also replace what the buffers on the way hold of earlier messages.
        """
        with self._changed:
            self._holding = True
        try:
            if overwrite:
                for _ in range(PADDING // PIECE):
                    self._send(Kind.PAD, 0, bytes(PIECE))
            return struct.unpack("<I", self._ask(Kind.QUIESCE, b"", Kind.QUIESCED))[0]
        except BaseException:
            self.resume()
            raise

    def resume(self) -> None:
        """Go on after `quiesce`; the guest's clock is set."""
        with self._changed:
            self._holding = False
            self._send(Kind.RESUME, 0, struct.pack("<Q", time.time_ns()))
            self._changed.notify_all()
        self._wake_up()

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, *, terminal: bool = False, file_command: bool = False,
        streams: socket.socket | None = None,
    ) -> AgentCommand:  # fmt: skip
        """Start a program, or one of the agent's file commands.

        Args:
            streams: what it reads and writes instead of pipes of its own.

        Raises:
            GuestLost: the guest has ended.
        """
        body = encode_start(argv, env, cwd, terminal, file_command)
        with self._changed:
            # While the machine is saved nothing is sent.
            if not self._changed.wait_for(lambda: not self._holding or self._ended, CALL_SECONDS):
                raise SandboxError(f"sandbox {self.sandbox}: it is being saved for more than {CALL_SECONDS:g} s")
            self._check()
            self._number += 1
            command = AgentCommand(self, self._number, terminal, streams)
            self._commands[command.number] = command
            self._send(START, command.number, body)
        self._wake_up()
        return command

    def _ask(self, kind: int, body: bytes, answer: int, seconds: float = CALL_SECONDS) -> bytes:
        with self._changed:
            self._answers.pop(answer, None)
            self._send(kind, 0, body)
            if not self._changed.wait_for(lambda: answer in self._answers or self._ended, seconds):
                raise GuestLost(f"sandbox {self.sandbox}: its agent does not answer within {seconds:g} s")
            self._check(answer not in self._answers)
            return self._answers.pop(answer)

    def _check(self, needed: bool = True) -> None:
        if self._ended and needed:
            raise GuestLost(f"sandbox {self.sandbox}: the guest has ended")

    def _send(self, kind: int, number: int, body: bytes) -> None:
        with self._changed:
            self._leaving += HEADER.pack(len(body), number, kind) + body
            self._transmit()
        if self._leaving:
            self._wake_up()

    def _transmit(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            while self._leaving:
                del self._leaving[: self.sock.send(memoryview(self._leaving)[: 4 * PIECE].tobytes())]

    def _wake_up(self) -> None:
        with self._changed:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def locked(self) -> threading.Condition:
        """Keeps the channel's thread away from its commands meanwhile."""
        return self._changed

    def kill(self, command: AgentCommand) -> None:
        """End a command and all that it started."""
        with self._changed:
            command.to_kill = True  # Sent by the thread, as soon as messages may be.
        self._wake_up()

    def forget(self, command: AgentCommand) -> None:
        """Its owner looks at it no more; if it still runs it is killed."""
        with self._changed:
            if command.result is None and not self._ended:
                command.left = True
                self.kill(command)
            else:
                self._commands.pop(command.number, None)
                command.close_ends()
        self._wake_up()

    def drop(self, command: AgentCommand) -> None:
        """It has ended and nobody looks at it."""
        self._commands.pop(command.number, None)

    def close(self) -> None:
        """The guest has ended or is about to: commands that still run are lost, and the thread stops."""
        with self._changed:
            self._end()
        self._wake_up()
        if threading.current_thread() is not self._thread:
            self._thread.join(CALL_SECONDS)

    def _end(self) -> None:
        self._ended = True
        for command in list(self._commands.values()):
            command.lose()
        self._commands.clear()
        self._changed.notify_all()

    def _pump(self) -> None:
        poll = select.poll()
        registered: dict[int, int] = {}
        try:
            while True:
                with self._changed:
                    if self._ended:
                        return
                    wanted = self._wanted()
                for fd in registered.keys() - wanted.keys():
                    poll.unregister(fd)
                for fd, (events, _) in wanted.items():
                    if registered.get(fd) != events:
                        poll.register(fd, events)
                registered = {fd: events for fd, (events, _) in wanted.items()}
                ready = poll.poll(1000)
                with self._changed:
                    for fd, events in ready:
                        handler = wanted[fd][1]
                        if handler is not None:
                            handler(events)
        except (OSError, ValueError, struct.error):
            pass  # The guest's end is gone, or it speaks no frames: it is lost.
        finally:
            with self._changed:
                self._end()
                self.sock.close()
                os.close(self._wake)
                self._wake = -1

    def _wanted(self) -> dict[int, tuple[int, Callable[[int], None] | None]]:
        """Descriptors to wait for, with what to do when they are ready."""
        leaving = len(self._leaving)
        wanted: dict[int, tuple[int, Callable[[int], None] | None]] = {
            self.sock.fileno(): (select.POLLIN | (select.POLLOUT if leaving else 0), self._on_socket),
            self._wake: (select.POLLIN, lambda events: _drain(self._wake)),
        }
        for command in list(self._commands.values()):
            if command.to_kill and not command.killed and not self._holding:
                command.killed = True
                self._send(Kind.KILL, command.number, b"")
            for kind in command.owed:
                self.credit(command, kind, 0)
            wanted.update(command.wanted(self, not self._holding and leaving < AHEAD))
        return wanted

    def _on_socket(self, events: int) -> None:
        if events & select.POLLOUT:
            self._transmit()
        if not events & ~select.POLLOUT:
            return
        try:
            data = self.sock.recv(4 * PIECE)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError
        self._arriving += data
        at = 0
        while len(self._arriving) - at >= HEADER.size:
            length, number, kind = HEADER.unpack_from(self._arriving, at)
            if length > PIECE:
                raise ValueError("no frame of the agent")
            if len(self._arriving) - at < HEADER.size + length:
                break
            body = bytes(self._arriving[at + HEADER.size : at + HEADER.size + length])
            at += HEADER.size + length
            self._frame(kind, number, body)
        del self._arriving[:at]

    def _frame(self, kind: int, number: int, body: bytes) -> None:
        if kind in (Kind.READY, Kind.QUIESCED):
            self._answers[kind] = body
            self._changed.notify_all()
            return
        command = self._commands.get(number)
        if command is None:
            return
        if kind in (OUTPUT, ERRORS):
            self.credit(command, kind, command.take(kind, body))
        elif kind == Kind.CONSUMED:
            command.room += struct.unpack("<I", body)[0]
        elif kind == EXITED:
            code, signal, microseconds, resident, kills = struct.unpack("<iiQQI", body)
            self.out_of_memory_kills = kills
            command.exited({"code": code, "signal": signal, "cpu": microseconds / 1e6, "rss": resident})

    def credit(self, command: AgentCommand, kind: int, count: int) -> None:
        """Tell the agent that `count` bytes of a stream have gone on; small amounts wait for more."""
        command.owed[kind] += count
        if command.owed[kind] >= WINDOW // 4 and not self._holding:
            self._send(CREDIT, command.number, struct.pack("<II", kind, command.owed[kind]))
            command.owed[kind] = 0

    def input(self, command: AgentCommand, data: bytes) -> None:
        """Pass on input of a command; b"" is its end."""
        self._send(Kind.INPUT if data else Kind.INPUT_END, command.number, data)

    def resize(self, command: AgentCommand, rows: int, columns: int) -> None:
        """Its terminal's window has another size."""
        self._send(Kind.WINDOW_SIZE, command.number, struct.pack("<HH", rows, columns))


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(fd)
