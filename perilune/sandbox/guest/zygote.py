"""The fork server: a small single-threaded process that makes sandboxes, so that none starts an interpreter of its own.

    owner ─ fork server ─ keeper (unshares, holds the parent-death signal) ─ agent (process 1 of the guest) ─ guest

Nothing survives the owner: the fork server ends when its socket closes, the kernel kills keeper and agent with their parents, and
with process 1 the whole process namespace.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
from typing import Any

from perilune.sandbox.guest import fork_server, linux, wire
from perilune.sandbox.guest.agent import run_agent


def serve(fd: int) -> None:
    """Answer requests on the socket `fd` until its other end closes.

    A request is the sandbox's description (`drivers/proc.py` writes it) with the agent's end of its control socket.
    """
    # Objects that live for good stay out of the collector's way, so that a fork's memory remains shared.
    gc.collect()
    gc.freeze()
    gc.disable()
    requests = socket.socket(fileno=fd)
    for request, fds in fork_server.requests(requests):
        control = socket.socket(fileno=fds[0])
        try:
            _start(request, control, requests)
        except OSError as error:
            _complain(control, error)
        control.close()


def _start(request: dict[str, Any], control: socket.socket, requests: socket.socket) -> None:
    mine, its = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            mine.close()
            requests.close()
            _keep(request, control, its, parent)
        except BaseException as error:
            _complain(control, error)
        os._exit(1)
    its.close()
    with mine:
        if mine.recv(1) != b"u":
            return
        for name, fallback in (("uid_map", request["uid"]), ("gid_map", request["gid"])):
            # Root gives its guests the ids of a whole machine; anyone else has one id to give.
            lines = [*(["0 0 65536"] if request["uid"] == 0 else []), f"0 {fallback} 1"]
            _write_map(f"/proc/{pid}/{name}", lines, f"/proc/{pid}/setgroups" if name == "gid_map" else "")
        mine.send(b"g")


def _complain(control: socket.socket, error: BaseException) -> None:
    with contextlib.suppress(OSError):
        kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
        wire.send(control, {"error": str(error) or kind, "kind": kind})


def _write_map(path: str, lines: list[str], setgroups: str) -> None:
    for number, line in enumerate(lines):
        try:
            if number == len(lines) - 1 and setgroups:
                _write(setgroups, "deny")
            return _write(path, line)
        except PermissionError:
            if number == len(lines) - 1:
                raise


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _keep(request: dict[str, Any], control: socket.socket, server: socket.socket, parent: int) -> None:
    """The keeper: enter cgroups and namespaces, fork the agent, hand its pidfd to the owner, wait for its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    linux.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for procs in request["cgroup_procs"]:
        _write(procs, "0")
    linux.unshare(linux.CLONE_NEWUSER)
    server.send(b"u")
    if server.recv(1) != b"g":
        raise OSError("the fork server could not write the id maps")
    server.close()
    with contextlib.suppress(PermissionError):  # Refused where setgroups is denied: then they are mapped to nobody.
        os.setgroups([])
    spaces = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | linux.CLONE_NEWCGROUP
    linux.unshare(spaces | (0 if request["network"] == "host" else linux.CLONE_NEWNET))
    go_read, go_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go_write)
        try:
            linux.die_with_parent(signal.SIGKILL)
            if os.read(go_read, 1) != b"g":
                os._exit(1)
            os.close(go_read)
            run_agent(request, control)
        except BaseException as error:
            _complain(control, error)
        os._exit(1)
    agent = os.pidfd_open(pid)
    wire.send(control, {"agent": pid}, [agent])
    os.write(go_write, b"g")
    os.closerange(0, 256)
    os.waitpid(pid, 0)
    os._exit(0)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
