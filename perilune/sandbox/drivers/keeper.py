"""Starts virtual machine monitors from a small process that ends with its owner, and takes them with it.

    owner ─ keeper ─ monitor (QEMU, Firecracker) ─ guest

The owner may be a trainer with a hundred gigabytes mapped, many threads and a thread pool that comes and goes: forking it is slow, and the
kernel's parent-death signal follows the thread that forked. The keeper is single-threaded and stays.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.sandbox.guest import linux, wire
from perilune.sandbox.protocol import DriverUnavailable

CALL_SECONDS = 30.0
FIRST_FD = 10
"""Number that a started program finds the first descriptor at that it was given."""
ORPHAN_CHECK_MS = 1000


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
        self._server: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
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
                if self._server is None or self._server.poll() is not None:
                    self._launch()
                assert self._requests is not None
                request = {"argv": list(argv), "groups": list(groups), "folder": folder}
                request["environment"] = dict(environment or {})
                wire.send(self._requests, request, [errors, *fds])
                answer = wire.receive(self._requests)
            except (OSError, wire.Malformed) as error:
                raise DriverUnavailable(f"the process that starts machines does not answer: {error}") from error
            if answer is None or "error" in answer[0]:
                raise DriverUnavailable(f"cannot start {argv[0]}: {answer and answer[0]['error']}")
            return Started(answer[0]["pid"], answer[1][0])

    def _launch(self) -> None:
        mine, its = wire.pair()
        code = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[3])!r}); "
            "from perilune.sandbox.drivers.keeper import serve; serve(int(sys.argv[1]))"
        )
        # Nothing of the owner's environment, which may hold keys, is in the memory of a process beside a guest.
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        self._server = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, str(its.fileno())], pass_fds=[its.fileno()], env=kept, cwd="/",
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        its.close()
        mine.settimeout(CALL_SECONDS)
        self._requests = mine

    def close(self) -> None:
        """End the keeper; what it started ends with it."""
        with self._lock:
            if self._requests is not None:
                self._requests.close()
                self._requests = None
            if self._server is not None:
                try:
                    self._server.wait(CALL_SECONDS)
                except subprocess.TimeoutExpired:
                    self._server.kill()
                    self._server.wait()
                self._server = None


def serve(fd: int) -> None:
    """Answer requests on the socket `fd` until its other end closes."""
    requests = socket.socket(fileno=fd)
    owner = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for what it starts; their pidfds tell of their end.
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        if not poll.poll(ORPHAN_CHECK_MS):
            if os.getppid() != owner:
                return
            continue
        message = wire.receive(requests)
        if message is None:
            return
        request, fds = message
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
