"""A machine whose guest has our agent: commands, files and ports through its channel, whatever monitor runs it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from perilune.sandbox.drivers.agent_channel import Channel
from perilune.sandbox.drivers.agent_command import AgentCommand
from perilune.sandbox.drivers.running import Running
from perilune.sandbox.protocol import GuestFileError, GuestLost, Spec

CALL_SECONDS = 30.0
FILE_SECONDS = 120.0


class AgentMachine:
    """What all such machines share.

    Attributes:
        sandbox, spec: what it is.
    """

    sandbox: str
    spec: Spec
    _channel: Channel | None = None
    _ended = False

    @property
    def channel(self) -> Channel:
        """To the agent. Raises GuestLost once the guest has ended."""
        if self._channel is None or self._ended:
            raise GuestLost(f"sandbox {self.sandbox}: the guest has ended")
        return self._channel

    def _hello(self, generation: str) -> None:
        """Begin the guest's life: randomness, clock, names and limits are its own when this returns."""
        limits = {name: getattr(self.spec.limits, name) for name in ("disk_bytes", "processes", "open_files")}
        self.channel.hello(generation, os.urandom(64), limits, self.sandbox)

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, terminal: bool = False) -> AgentCommand:
        """Start a program; with `terminal` its streams are one pseudo-terminal."""
        return self.channel.start(argv, env, cwd, terminal=terminal)

    def file_command(self, command: str, arguments: Mapping[str, Any], data: bytes = b"") -> bytes:
        """Read, write or list files, or list listening ports, as a process of the guest; returns what `guest/commands.py` would.

        Raises:
            GuestFileError: what the guest's kernel said about the path.
        """
        path = str(arguments.get("path", ""))
        if "\0" in path:
            raise GuestFileError(f"sandbox {self.sandbox}: {command} {path!r}: a path has no NUL in it")
        last = {"read": "limit", "write": "mode"}.get(command)
        words = [command, *([path] if path else []), *([str(arguments[last])] if last else [])]
        with contextlib.closing(self.channel.start(words, {}, "/", file_command=True)) as process:
            running = Running(process, data, time.monotonic() + FILE_SECONDS, keep=1 << 62)
            for _ in running.outputs():
                pass
            done = process.finish()
        if done["code"] != 0:
            reason = bytes(running.kept["stderr"]).decode(errors="replace").strip()
            if running.timed_out:
                reason = f"no answer within {FILE_SECONDS:g} s"
            raise GuestFileError(f"sandbox {self.sandbox}: {command} {path}: {reason or 'failed'}")
        return _answer(command, bytes(running.kept["stdout"]))

    def connect(self, port: int) -> socket.socket:
        """A socket whose other end the agent relays to a port of the guest. Raises GuestFileError."""
        mine, its = socket.socketpair()
        try:
            process = self.channel.start(["connect", str(port)], {}, "/", file_command=True, streams=its)
            its.close()
            said = _first(process)
            if said != b"+":
                process.close()
                text = said.decode(errors="replace") or "failed"
                raise GuestFileError(f"sandbox {self.sandbox}: connect port {port}: {text}")
            process.release()
            return mine
        except BaseException:
            mine.close()
            its.close()
            raise

    def out_of_memory_kills(self) -> int:
        """How many processes the memory limit has ended, as of the last command that ended."""
        return self.channel.out_of_memory_kills

    def unsaved_processes(self) -> int:
        """See `protocol.Machine`."""
        return 0

    def file_bytes(self) -> int:
        """See `protocol.Machine`."""
        return 0


def _first(process: AgentCommand) -> bytes:
    """What a command says first on stderr, or all of it if it ends."""
    found = select.select([process.stderr, process.status_fd()], [], [], CALL_SECONDS)[0]
    return os.read(process.stderr, 4096) if found else b"no answer"


def _answer(command: str, data: bytes) -> bytes:
    """The agent's plain text as the JSON that clients read."""
    if command == "list":
        entries = []
        for line in data.split(b"\0")[:-1]:
            kind, size, mode, mtime, name = line.split(b" ", 4)
            entries.append([os.fsdecode(name), kind.decode(), int(size), int(mode), int(mtime)])
        return json.dumps(sorted(entries)).encode()
    if command == "listening":
        return json.dumps(sorted({int(line) for line in data.split()})).encode()
    return data
