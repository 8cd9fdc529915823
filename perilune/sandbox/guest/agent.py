"""Process 1 of a `proc` guest: starts programs, reaps children, stops everything for a capture, streams the changed files.

It holds the owner's control socket and ends with it, and the kernel then ends every process of the guest. The guest cannot reach
it: it is not dumpable, ignores the guest's signals as process 1 does, and imports nothing once the root is the guest's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
import termios
import time
from typing import Any

from perilune.sandbox.guest import arena, commands, layer, linux, rooting, seccomp, wire

STOP_SECONDS = 5.0
"""How long the guest's processes may take to stop before a capture gives up."""
_TIOCGPTPEER = 0x5441


def run_agent(request: dict[str, Any], control: socket.socket) -> None:
    """Set up the guest described by `request`, say so on `control`, serve it until the owner is gone."""
    stored = json.loads(layer.load(request["blobs"], request["layer"])) if request["layer"] else []
    uppers, changes = rooting.make_root(request, stored)
    # From here on files are the guest's: a module found by name could be its code.
    sys.meta_path.clear()
    sys.path_hooks.clear()
    sys.path.clear()
    # The agent needs no more than its guest may have, and what it starts inherits it.
    linux.drop_privileges()
    linux.set_dumpable(False)
    program = seccomp.program(linux.machine())
    if program is not None:
        linux.install_filter(program)
    wire.send(control, {"ready": request["generation"], "seccomp": program is not None, "changes": changes})
    _Agent(request, control, uppers).serve()


class _Agent:
    def __init__(self, request: dict[str, Any], control: socket.socket, uppers: list[int]) -> None:
        self.request, self.control, self.uppers = request, control, uppers
        self.proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        self.pts = os.open("/dev/pts", os.O_RDONLY | os.O_DIRECTORY)
        self.arenas = arena.Tracker(self.proc, uppers, [tree["path"] for tree in request["trees"]])
        self.running: dict[int, socket.socket] = {}
        self.frozen: set[int] | None = None
        """Processes that were stopped already before a freeze; None while not frozen."""
        self.poll = select.poll()
        wake_read, self.wake_write = socket.socketpair()
        for sock in (wake_read, self.wake_write):
            sock.setblocking(False)
        self.wake = wake_read
        signal.set_wakeup_fd(self.wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self.poll.register(control, select.POLLIN)
        self.poll.register(self.wake, select.POLLIN)

    def serve(self) -> None:
        while True:
            for fd, _ in self.poll.poll():
                if fd == self.control.fileno():
                    message = wire.receive(self.control)
                    if message is None:
                        return
                    self._handle(*message)
                elif fd == self.wake.fileno():
                    with contextlib.suppress(BlockingIOError):
                        self.wake.recv(4096)
                else:
                    # One byte or the end of an execution's status socket: it shall not run on.
                    for pid, status in self.running.items():
                        if status.fileno() == fd:
                            _drain(status)
                            self._kill(pid)
                            self.poll.unregister(fd)
                            break
            self._reap()

    def _handle(self, message: dict[str, Any], fds: list[int]) -> None:
        operation = message["op"]
        try:
            if operation == "run":
                self._run(message, fds)
                return
            if operation == "freeze":
                self._freeze()
            elif operation == "thaw":
                self._thaw()
            elif operation == "capture":
                self._capture(fds[0], message.get("after"))
            answer = {"done": operation, "processes": len(self._others()), "capture": self.arenas.capture}
        except (OSError, TimeoutError) as error:
            answer = {"error": f"{operation}: {error}"}
        finally:
            for fd in fds:
                os.close(fd)
        wire.send(self.control, answer)

    def _run(self, message: dict[str, Any], fds: list[int]) -> None:
        """Start a guest process: fds are stdin, stdout, stderr and the status socket; with a terminal the last one only."""
        status = socket.socket(fileno=os.dup(fds[-1]))
        status.setblocking(False)
        master = peer = -1
        try:
            if message.get("terminal"):
                master = os.open("ptmx", os.O_RDWR | os.O_NOCTTY, dir_fd=self.pts)
                fcntl.ioctl(master, 0x40045431, b"\0\0\0\0")  # TIOCSPTLCK: unlock.
                peer = fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY)
                fds = [peer, peer, peer]
            pid = os.fork()
            if pid == 0:
                self._become(message, fds[:3])
            if master >= 0:
                wire.send(status, {"started": pid}, [master])
        except OSError as error:
            with contextlib.suppress(OSError):
                wire.send(status, {"error": f"cannot start a process: {error.strerror}"})
            status.close()
            return
        finally:
            for fd in (master, peer):
                if fd >= 0:
                    os.close(fd)
        self.running[pid] = status
        self.poll.register(status, select.POLLIN)

    def _become(self, message: dict[str, Any], fds: list[int]) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
            os.closerange(3, 4096)
            if message.get("terminal"):
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            self._become_prey()
            commands.set_limits(self.request)
            if "command" in message:
                code = commands.run_file_command(message)
            else:
                code = commands.execute(message["argv"], message["env"], message["cwd"])
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(2, f"perilune: {type(error).__name__}: {error}\n".encode(errors="replace"))
        finally:
            os._exit(code)

    def _become_prey(self) -> None:
        # Out of memory, the kernel takes guest processes before this agent. Not everyone may write it before an exec.
        with contextlib.suppress(OSError):
            fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
            os.write(fd, b"1000")
            os.close(fd)

    def _reap(self) -> None:
        while True:
            try:
                pid, code, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            status = self.running.pop(pid, None)
            if status is None:
                continue
            with contextlib.suppress(KeyError):
                self.poll.unregister(status)
            _drain(status)
            signalled = os.WTERMSIG(code) if os.WIFSIGNALED(code) else 0
            with contextlib.suppress(OSError):
                wire.send(status, {
                    "code": 128 + signalled if signalled else os.WEXITSTATUS(code), "signal": signalled,
                    "cpu": usage.ru_utime + usage.ru_stime, "rss": usage.ru_maxrss * 1024,
                })  # fmt: skip
            status.close()

    def _kill(self, pid: int) -> None:
        """End an execution: what descends from it and what is still in its session. Other processes of the guest go on.

        All are stopped while the victims are found, so that a program that forks without end cannot outrun it.
        """
        running = self.frozen is None
        try:
            self._freeze()
            table = {other: self._stat(other) for other in self._others()}
            victims = {other for other, (_, _, session) in table.items() if other == pid or session == pid}
            found = list(victims)
            for parent in found:
                children = {other for other, (_, above, _) in table.items() if above == parent} - victims
                victims |= children
                found += children
        except TimeoutError:
            victims = set(self._others())
        for other in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
        if running and self.frozen is not None:
            self._thaw()

    def _others(self) -> list[int]:
        return [int(name) for name in os.listdir(self.proc) if name.isdigit() and name != "1"]

    def _stat(self, pid: int, task: str = "") -> tuple[str, int, int]:
        """State letter, parent and session of a process or of one of its threads; ("X", 0, 0) if it is gone."""
        try:
            fd = os.open(f"{pid}{task}/stat", os.O_RDONLY, dir_fd=self.proc)
        except OSError:
            return "X", 0, 0
        try:
            fields = os.read(fd, 4096).rpartition(b")")[2].split()
        except OSError:
            return "X", 0, 0
        finally:
            os.close(fd)
        return fields[0].decode(), int(fields[1]), int(fields[3])

    def _states(self, pid: int) -> set[str]:
        try:
            fd = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.proc)
        except OSError:
            return set()
        try:
            return {self._stat(pid, f"/task/{task}")[0] for task in os.listdir(fd)}
        except OSError:
            return set()
        finally:
            os.close(fd)

    def _freeze(self) -> None:
        """Stop every process of the guest and wait until none can run. Signalling all at once also catches forks under way."""
        if self.frozen is not None:
            return
        self.frozen = {pid for pid in self._others() if self._stat(pid)[0] == "T"}
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP)
        deadline, patience = time.monotonic() + STOP_SECONDS, time.monotonic() + 0.05
        while True:
            # The parent of a vfork waits uninterruptibly for its stopped child: after a while D counts as stopped.
            still = {"T", "t", "Z", "X", *(("D",) if time.monotonic() > patience else ())}
            moving = [pid for pid in self._others() if not self._states(pid) <= still]
            if not moving:
                return
            if time.monotonic() > deadline:
                self._thaw()
                raise TimeoutError(f"{len(moving)} processes did not stop within {STOP_SECONDS:g} s")
            select.select([], [], [], 0.0005)

    def _thaw(self) -> None:
        stopped, self.frozen = self.frozen or set(), None
        for pid in self._others():
            if pid not in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _capture(self, fd: int, after: int | None) -> None:
        """Stream all that the guest changed, cut at one instant: nothing of the guest runs meanwhile.

        Args:
            after: capture that the owner still has whole; of tracked arenas only what changed since is sent.
        """
        running = self.frozen is None
        self._freeze()
        try:
            changed = self.arenas.changed(after)
            with open(os.dup(fd), "wb", buffering=1 << 18) as file:
                layer.stream(self.uppers, [tree["path"] for tree in self.request["trees"]], file.write, changed)
        finally:
            if running:
                self._thaw()


def _drain(status: socket.socket) -> None:
    """Take what the owner has sent: a socket that is closed with unread messages resets the other end."""
    with contextlib.suppress(OSError):
        status.recv(64)
