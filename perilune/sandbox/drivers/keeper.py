"""Starts virtual machine monitors from a small process that ends with its owner, and takes them with it.

    owner ─ keeper ─ monitor (QEMU, Firecracker) ─ guest

The keeper is a fork server (`drivers/fork_server.py` says why it is not the owner that forks).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.sandbox.drivers.fork_server import ForkServer
from perilune.sandbox.guest import fork_server, linux, wire
from perilune.sandbox.protocol import DriverUnavailable

CALL_SECONDS = 30.0
FIRST_FD = 10
"""Number that a started program finds the first descriptor at that it was given."""


@dataclass(slots=True)
class Started:
    """A process that a keeper started: its number, and a descriptor that is readable once it has ended."""

    pid: int
    pidfd: int

    def alive(self) -> bool:
        """Whether it still runs."""
        return self.pidfd >= 0 and not select.select([self.pidfd], [], [], 0)[0]

    def kill(self) -> None:
        """Kill it; `end` waits for it and frees the descriptor."""
        with contextlib.suppress(OSError):
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def end(self, seconds: float = CALL_SECONDS) -> None:
        """Kill it and wait until it is gone; a second call does nothing."""
        if self.pidfd < 0:
            return
        self.kill()
        select.select([self.pidfd], [], [], seconds)
        os.close(self.pidfd)
        self.pidfd = -1


class Keeper:
    """The owner's side; started at the first `start`, safe from several threads."""

    def __init__(self) -> None:
        self._server = ForkServer(__name__, CALL_SECONDS)
        self._lock = threading.Lock()

    def start(
        self, argv: Sequence[str], fds: Sequence[int], errors: int, groups: Sequence[str] = (), folder: str = "/",
        environment: Mapping[str, str] | None = None,
    ) -> Started:  # fmt: skip
        """Start a program.

        Args:
            argv: path and arguments.
            fds: what it finds at `FIRST_FD` and up.
            errors: a file for its stdout and stderr.
            groups: cgroup.procs files that it enters first.
            folder: where it runs.
            environment: variables that it finds beside PATH.

        Raises:
            DriverUnavailable: it could not be started.
        """
        with self._lock:
            try:
                requests = self._server.socket()
                request = {"argv": list(argv), "groups": list(groups), "folder": folder}
                request["environment"] = dict(environment or {})
                wire.send(requests, request, [errors, *fds])
                answer = wire.receive(requests)
            except (OSError, wire.Malformed) as error:
                raise DriverUnavailable(f"the process that starts machines does not answer: {error}") from error
            if answer is None or "error" in answer[0]:
                raise DriverUnavailable(f"cannot start {argv[0]}: {answer and answer[0]['error']}")
            return Started(answer[0]["pid"], answer[1][0])

    def close(self) -> None:
        """End the keeper; what it started ends with it."""
        with self._lock:
            self._server.close()


def serve(fd: int) -> None:
    """Answer requests on the socket `fd` until its other end closes."""
    requests = socket.socket(fileno=fd)
    for request, fds in fork_server.requests(requests):
        try:
            _start(request, fds, requests)
        except OSError as error:
            wire.send(requests, {"error": str(error)})
        for number in fds:
            os.close(number)


def _start(request: dict[str, Any], fds: list[int], requests: socket.socket) -> None:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _become(request, fds, parent)
        except BaseException as error:
            os.write(fds[0], f"cannot start {request['argv'][0]}: {error}\n".encode())
        os._exit(1)
    pidfd = os.pidfd_open(pid)
    try:
        wire.send(requests, {"pid": pid}, [pidfd])
    finally:
        os.close(pidfd)


def _become(request: dict[str, Any], fds: list[int], parent: int) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    linux.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for procs in request["groups"]:
        with open(procs, "w") as file:
            file.write("0")
    os.chdir(request["folder"])
    null = os.open("/dev/null", os.O_RDWR)
    # First out of the way, then to where they belong.
    moved = [os.dup(number) if number >= 100 else _above(number, 100) for number in (null, *fds)]
    os.dup2(moved[0], 0)
    os.dup2(moved[1], 1)
    os.dup2(moved[1], 2)
    for place, number in enumerate(moved[2:]):
        os.dup2(number, FIRST_FD + place)
    os.closerange(3, FIRST_FD)
    os.closerange(FIRST_FD + len(moved) - 2, 4096)
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **request["environment"]}
    os.execve(request["argv"][0], request["argv"], environment)


def _above(fd: int, least: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD, least)
