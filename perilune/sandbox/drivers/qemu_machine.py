"""A live virtual machine from the host's side: made as a private copy of its template, saved as what differs from it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from perilune.sandbox.drivers.agent_command import AgentCommand
from perilune.sandbox.drivers.cgroup import Group
from perilune.sandbox.drivers.guarantees import machine_guarantees
from perilune.sandbox.drivers.memory import Memory
from perilune.sandbox.drivers.qemu_channel import Channel
from perilune.sandbox.drivers.qemu_process import Vm, said
from perilune.sandbox.drivers.qemu_template import Template
from perilune.sandbox.drivers.running import Running
from perilune.sandbox.pages import EMPTY, Packs, Table, Writer
from perilune.sandbox.protocol import GuestFileError, GuestLost, Look, Saved, SecretInSnapshot, Spec
from perilune.sandbox.store import Batch

CALL_SECONDS = 30.0
FILE_SECONDS = 120.0
FORMAT = 1


class QemuMachine:
    """A guest that runs.

    Args:
        sandbox, generation, spec: what it is.
        vm: QEMU, which waits for a device state over the template's memory.
        template: what it is a copy of.
        group: control group of the process.
        saved: table of the pages that differ from the template, and the packs' folder; None = none do.
        devices: state to continue from.
        accelerator: "tcg" or "kvm".

    Attributes:
        seconds: from the start of QEMU until the processor ran, and until the guest had begun its new life.
    """

    def __init__(
        self, sandbox: str, generation: str, spec: Spec, vm: Vm, template: Template, group: Group, begun: float,
        saved: tuple[Table, Packs] | None, devices: bytes, accelerator: str,
    ) -> None:  # fmt: skip
        self.sandbox, self.spec, self.vm, self.template, self.group = sandbox, spec, vm, template, group
        self.guarantees = machine_guarantees(group, spec, accelerator, template.size)
        self.seconds: dict[str, float] = {}
        self._last = EMPTY
        self._ended = False
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        try:
            self.memory = Memory.find(vm.started.pid, str(template.memory), template.size)
            if saved is not None:
                self._last, packs = saved
                for number, pages in packs.pieces(self._last):
                    self.memory.write(number, pages)
            vm.monitor.load_devices(devices)
            self.seconds["running"] = time.monotonic() - begun
            self._channel = Channel(sandbox, vm.agent)
            limits = {name: getattr(spec.limits, name) for name in ("disk_bytes", "processes", "open_files")}
            self._channel.hello(generation, os.urandom(64), limits, sandbox)
            self.seconds["ready"] = time.monotonic() - begun
        except BaseException as error:
            text = said(vm.errors)
            self.destroy()
            if isinstance(error, GuestLost) and text:
                raise GuestLost(f"{error}; QEMU says: {text}") from error
            raise

    @property
    def channel(self) -> Channel:
        """To the agent."""
        if self._channel is None or self._ended:
            raise GuestLost(f"sandbox {self.sandbox}: the guest has ended")
        return self._channel

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
        """A socket whose other end the agent relays to a port of the guest."""
        mine, its = socket.socketpair()
        try:
            process = self.channel.start(["connect", str(port)], {}, "/", file_command=True, streams=its)
            its.close()
            said = _first(process)
            if said != b"+":
                raise GuestFileError(
                    f"sandbox {self.sandbox}: connect port {port}: {said.decode(errors='replace') or 'failed'}"
                )
            process.release()
            return mine
        except BaseException:
            mine.close()
            its.close()
            raise

    def freeze(self) -> int:
        """Have the guest stand still, its processes between two instructions of theirs; returns how many there are."""
        return self._freeze(overwrite=False)

    def _freeze(self, overwrite: bool) -> int:
        processes = self.channel.quiesce(overwrite)
        try:
            self.vm.monitor.execute("stop")
        except BaseException:
            self.channel.resume()
            raise
        return processes

    def thaw(self) -> None:
        """Let it go on, with its clock set."""
        self.vm.monitor.execute("cont")
        self.channel.resume()

    def save(self, batch: Batch, look: Look) -> Saved:
        """Store devices and all pages that differ from the template; the guest stands still (`freeze`).

        Raises:
            SecretInSnapshot: a secret is in its memory; it goes with the command that it was given to.
        """
        with self._lock:
            try:
                return self._save(batch, look)
            except SecretInSnapshot:
                # Buffers on the way to the agent may still hold it: overwrite them, then look once more.
                self.thaw()
                self._freeze(overwrite=True)
                return self._save(batch, look)

    def _save(self, batch: Batch, look: Look) -> Saved:
        devices = self.vm.monitor.save_devices()
        number = self.memory.own_pages()
        pages = self.memory.read(number)
        part = self.template.stored(batch)
        packs = batch.store.packs
        packs.learn([*part["packs"], *self._last.packs])
        table = Writer(packs, batch, self._last, frozenset(part["packs"])).write(number, pages, look, "its memory")
        names = {"table": batch.put(table.encode()), "devices": batch.put(devices)}
        record = {
            "format": FORMAT, "made_of": self.template.made_of, "template": part, **names, "packs": list(table.packs),
            "needs": sorted({part["table"], part["devices"], *part["packs"], *table.packs, *names.values()}),
        }  # fmt: skip
        self._last = table
        return Saved(batch.put(json.dumps(record).encode()), len(number), pages.nbytes + len(devices))

    def out_of_memory_kills(self) -> int:
        """How many processes the memory limit has ended, as of the last command that ended."""
        return self.channel.out_of_memory_kills

    def pids(self) -> list[int]:
        """See `protocol.Machine`."""
        return [self.vm.started.pid] if self.alive() else []

    def unsaved_processes(self) -> int:
        """See `protocol.Machine`."""
        return 0

    def file_bytes(self) -> int:
        """See `protocol.Machine`."""
        return 0

    def alive(self) -> bool:
        """Whether QEMU runs; it ends with a panic of the guest's kernel."""
        return not self._ended and self.vm.started.alive()

    def destroy(self) -> None:
        """End it at once and free all of it."""
        if self._ended:
            return
        self._ended = True
        self.vm.started.kill()
        if self._channel is not None:
            self._channel.close()
        self.vm.end()
        self.group.remove()


def _first(process: AgentCommand) -> bytes:
    """What a command says first on stderr, or all of it if it ends."""
    import select

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
