"""What a running sandbox is asked most: commands, files, ports. `client.Sandbox` adds its life."""

from __future__ import annotations

import abc
import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from perilune.errors import ConfigError
from perilune.sandbox.drivers.running import Running
from perilune.sandbox.execution import Execution
from perilune.sandbox.protocol import (
    LONGEST_SECONDS,
    Driver,
    GuestFile,
    GuestLost,
    Machine,
    OnOutput,
    Process,
    Result,
    Spec,
)

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "USER": "root",
}
SHORTEST_SECRET = 8
"""Bytes below which a secret is not looked for in files: it would be found everywhere."""


def check_argv(argv: Sequence[str]) -> None:
    """Raise ConfigError for what names no program, or is one string instead of several."""
    if isinstance(argv, str):
        raise ConfigError(f"a command is a list of words: ['sh', '-c', {argv!r}], not the one string {argv!r}")
    if not argv or not argv[0] or any("\0" in part for part in argv):
        raise ConfigError(f"a command needs a program's name, and no NUL in it; given: {list(argv)!r}")


def check_bytes(what: str, data: bytes) -> None:
    """Raise ConfigError for text where bytes are needed: only its writer knows the encoding."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ConfigError(f"{what} must be bytes, not {type(data).__name__}; text becomes bytes by .encode()")


class GuestCalls(abc.ABC):
    """Calls on the guest of a sandbox; see `client.Sandbox` for the attributes."""

    id: str
    name: str
    driver: Driver
    spec: Spec
    generation: str
    _secrets: dict[str, bytes]
    _executions: set[Execution]
    _lock: threading.RLock

    @abc.abstractmethod
    def _running(self, call: str) -> Machine:
        """The machine of a running sandbox. Raises TransitionError."""

    @abc.abstractmethod
    def _lost(self, machine: Machine) -> None:
        """The machine has ended."""

    @abc.abstractmethod
    def _finished(self, execution: Execution) -> None:
        """A command has ended."""

    def start(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | int = b"",
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        cwd: str = "/workspace",
    ) -> Execution:
        """Start a command and return at once.

        Args:
            argv: program and arguments; no shell.
            stdin: its whole input, or a descriptor whose content is passed on as it comes.
            timeout: seconds until it is killed; None = `Limits.exec_seconds`.
            env: variables over `ENVIRONMENT`.
            secrets: variables that are given to this command only; a checkpoint refuses files that hold one.
            cwd: folder of the guest to start in.

        Raises:
            TransitionError: the sandbox is not running.
            GuestLost: the guest has ended.
        """
        check_argv(argv)
        if not isinstance(stdin, int):
            check_bytes("stdin", stdin)
        limits = self.spec.limits
        seconds = limits.exec_seconds if timeout is None else timeout
        if not 0 < seconds <= LONGEST_SECONDS:
            raise ConfigError(f"timeout={seconds!r} must be above zero and at most {LONGEST_SECONDS:,} seconds")
        with self._lock:
            machine = self._running("exec")
            try:
                process = machine.start(argv, self._variables(env, secrets), cwd)
            except GuestLost:
                self._lost(machine)
                raise
            running = Running(
                process, b"" if isinstance(stdin, int) else stdin, time.monotonic() + seconds, limits.output_bytes,
                source=stdin if isinstance(stdin, int) else -1,
            )  # fmt: skip
            execution = Execution(self, machine, process, running)
            self._executions.add(execution)
            return execution

    def exec(self, argv: Sequence[str], *, on_output: OnOutput | None = None, **options: Any) -> Result:
        """Run a command to its end; `on_output` gets its output as it comes. Options and errors as `start`."""
        execution = self.start(argv, **options)
        try:
            for output in execution:
                if on_output is not None:
                    on_output(output)
        except BaseException:
            execution.close()
            raise
        return execution.result()

    def terminal(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        cwd: str = "/workspace",
        size: tuple[int, int] = (24, 80),
    ) -> Process:
        """Start a command on a pseudo-terminal; the caller relays `Process.terminal` and closes the process.

        Args:
            size: rows and columns of its window; `Process.resize` changes them.
        """
        check_argv(argv)
        machine = self._running("terminal")
        process = machine.start(argv, self._variables(env, secrets), cwd, terminal=True)
        with contextlib.suppress(OSError):  # It has ended already.
            process.resize(*size)
        return process

    def _variables(self, env: Mapping[str, str] | None, secrets: Mapping[str, str] | None) -> dict[str, str]:
        """A command's environment; its secrets are noted, so that no checkpoint saves them."""
        for name, value in [*(env or {}).items(), *(secrets or {}).items()]:
            if not isinstance(name, str) or not isinstance(value, str):
                raise ConfigError(
                    f"variable {name!r} must be text with a text as its value, not {type(value).__name__}"
                )
            if not name or "=" in name or "\0" in name + value:
                raise ConfigError(f"variable {name!r} must have a name without '=', and no NUL in name or value")
        for name, value in (secrets or {}).items():
            if len(value.encode()) >= SHORTEST_SECRET:
                self._secrets[name] = value.encode()
        identity = {"PERILUNE_SANDBOX": self.id, "PERILUNE_GENERATION": self.generation}
        return {**ENVIRONMENT, **(env or {}), **(secrets or {}), **identity}

    def _file(self, command: str, data: bytes = b"", **arguments: Any) -> bytes:
        machine = self._running(command)
        try:
            return machine.file_command(command, arguments, data)
        except GuestLost:
            self._lost(machine)
            raise

    def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """Content of a regular file of the guest. Raises GuestFileError; also for one that is longer."""
        return self._file("read", path=path, limit=max_bytes)

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file of the guest whole, its folders with it. Raises GuestFileError."""
        check_bytes("a file's content", data)
        self._file("write", data, path=path, mode=mode)

    def list(self, path: str) -> list[GuestFile]:
        """Entries of a guest's folder, by name. Raises GuestFileError."""
        return [GuestFile(*entry) for entry in json.loads(self._file("list", path=path))]

    def ports(self) -> list[int]:
        """TCP ports that the guest listens on."""
        return json.loads(self._file("listening"))

    def connect(self, port: int) -> socket.socket:
        """A connection to a port of the guest; works without any network between host and guest."""
        machine = self._running("connect")
        try:
            return machine.connect(port)
        except GuestLost:
            self._lost(machine)
            raise
