"""A command in a container: the engine's one stream, taken apart into descriptors as every driver gives them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from perilune.errors import SandboxError
from perilune.sandbox.drivers.docker_engine import frames
from perilune.sandbox.drivers.proc_machine import descendants
from perilune.sandbox.protocol import GuestLost

if TYPE_CHECKING:
    from perilune.sandbox.drivers.docker_machine import DockerMachine

ENDING_SECONDS = 0.3
"""How long a container may take to end after the first of its processes was killed."""
STARTING_SECONDS = 5.0
"""How long an engine may take to start a command after it has said that it does."""
MOST_LOOKS = 20
"""For what a command has started, until all of it stands still; an engine's limit of processes bounds it in any case."""


class DockerProcess:
    """A command of a `DockerMachine`; threads pass its stream on."""

    def __init__(self, machine: DockerMachine, execution: str, sock: socket.socket, terminal: bool) -> None:
        self._machine, self._engine, self._sandbox = machine, machine.engine, machine.sandbox
        self._execution, self._sock = execution, sock
        self.stdin = self.stdout = self.stderr = self.terminal = -1
        self._killed = False
        self._status, self._tell = os.pipe()
        if terminal:
            ours, theirs = socket.socketpair()
            self.terminal = ours.detach()
            work = ((self._copy, sock, theirs), (self._copy, theirs, sock))
            self._kept: list[Any] = [theirs]
        else:
            read, self.stdin = os.pipe()
            self.stdout, out = os.pipe()
            self.stderr, err = os.pipe()
            work = ((self._take, out, err), (self._feed, read))
            self._kept = []
        for function, *arguments in (*work, (self._wait,)):
            threading.Thread(target=function, args=arguments, daemon=True).start()

    def _take(self, out: int, err: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            for stream, data in frames(self._sock):
                view = memoryview(data)
                while view:
                    view = view[os.write(err if stream == 2 else out, view) :]
        os.close(out)
        os.close(err)

    def _feed(self, read: int) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(read, 65536):
                self._sock.sendall(data)
            self._sock.shutdown(socket.SHUT_WR)
        os.close(read)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)

    def _wait(self) -> None:
        """Tell when the program itself has ended; what it left in the background may hold its streams."""
        pause, done = 0.003, {}
        while not done:
            time.sleep(pause)
            pause = min(0.05, pause * 1.5)
            try:
                state = self._engine.json("GET", f"/exec/{self._execution}/json")
            except SandboxError:
                break
            if not state["Running"] and state["ExitCode"] is not None:
                by_us = self._killed or state["ExitCode"] != 128 + signal.SIGKILL
                if not by_us and self._machine.ended(ENDING_SECONDS):
                    break
                done = {"code": int(state["ExitCode"])}
        time.sleep(0.01)  # The last of its output is on its way through the engine.
        with contextlib.suppress(OSError):
            os.write(self._tell, json.dumps(done).encode() + b"\n")

    def status_fd(self) -> int:
        """See `protocol.Process`."""
        return self._status

    def finish(self) -> Mapping[str, Any]:
        """See `protocol.Process`; the engine does not tell what a command used."""
        done = json.loads(os.read(self._status, 4096) or b"{}")
        if not done:
            raise GuestLost(f"sandbox {self._sandbox}: the container ended while a command ran")
        number = (
            done["code"] - 128
            if done["code"] in (128 + signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGSEGV)
            else 0
        )
        return {"code": done["code"], "signal": number, "cpu": 0.0, "rss": 0}

    def resize(self, rows: int, columns: int) -> None:
        """See `protocol.Process`. An engine refuses it until it has started the program, and that is waited for."""
        deadline = time.monotonic() + STARTING_SECONDS
        while True:
            try:
                self._engine.call("POST", f"/exec/{self._execution}/resize", query={"h": rows, "w": columns})
                return
            except SandboxError as error:
                if self._has_started() or time.monotonic() > deadline:
                    raise OSError(f"the engine does not resize the terminal: {error}") from error
            time.sleep(0.01)

    def _has_started(self) -> bool:
        try:
            state = self._engine.json("GET", f"/exec/{self._execution}/json")
        except SandboxError:
            return True
        return bool(state["Pid"]) or state["ExitCode"] is not None

    def kill(self) -> None:
        """End the program, what descends from it, and what is still in its session.

        All are stopped before the first one is ended: the program shall not go on because a child that it waited for was killed, nor
        fork faster than it is looked for.
        """
        self._killed = True
        with contextlib.suppress(SandboxError):
            state = self._engine.json("GET", f"/exec/{self._execution}/json")
            if not state["Running"] or not state["Pid"]:
                return
            first = int(state["Pid"])
            session, victims = _session(first), [first]
            for _ in range(MOST_LOOKS):
                same = [pid for pid in self._machine.pids() if session and _session(pid) == session]
                found = list(dict.fromkeys((first, *descendants(first), *same)))
                _signal(found, signal.SIGSTOP)
                if set(found) <= set(victims):
                    break
                victims = list(dict.fromkeys((*victims, *found)))
            _signal(victims, signal.SIGKILL)

    def close(self) -> None:
        """See `protocol.Process`."""
        if self._status < 0:
            return
        self.kill()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for kept in self._kept:
            kept.close()
        for fd in {self.stdin, self.stdout, self.stderr, self.terminal, self._status, self._tell} - {-1}:
            os.close(fd)
        self.stdin = self.stdout = self.stderr = self.terminal = self._status = self._tell = -1


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _session(pid: int) -> int:
    """A process's session on the host; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return 0
