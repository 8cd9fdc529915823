"""A live virtual machine from the host's side: made as a private copy of its template, saved as what differs from it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from perilune.sandbox.drivers.agent_channel import Channel
from perilune.sandbox.drivers.agent_machine import AgentMachine
from perilune.sandbox.drivers.cgroup import Group
from perilune.sandbox.drivers.guarantees import machine_guarantees
from perilune.sandbox.drivers.memory import Memory
from perilune.sandbox.drivers.qemu_process import Vm, said
from perilune.sandbox.drivers.qemu_template import Template
from perilune.sandbox.page_names import PAGE
from perilune.sandbox.page_writer import Writer, still_good
from perilune.sandbox.pages import EMPTY, PACK_PAGES, ZERO, Numbers, Packs, Table, overlaid
from perilune.sandbox.protocol import GuestLost, Look, Saved, SecretInSnapshot, Spec
from perilune.sandbox.store import Batch

FORMAT = 1
MEMORY = "its memory"
"""What a secret's place is called."""


class QemuMachine(AgentMachine):
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
        self._changed: Numbers | None = None
        """Pages that are not as `_last` says, as far as the kernel has told of them; None where it tells of none."""
        self._lock = threading.Lock()
        try:
            for procs in group.procs_files:
                Path(procs).write_text(str(vm.started.pid))
            self.memory = self._filled(saved)
            self._changed = self.memory.written()
            if self._changed is not None:  # What was just put there is as the table says.
                self._changed = np.setdiff1d(self._changed, self._last.number, assume_unique=True)
            vm.monitor.load_devices(devices)
            self.seconds["running"] = time.monotonic() - begun
            self._channel = Channel(sandbox, vm.agent)
            self._hello(generation)
            self.seconds["ready"] = time.monotonic() - begun
        except BaseException as error:
            text = said(vm.errors)
            self.destroy()
            if isinstance(error, GuestLost) and text:
                raise GuestLost(f"{error}; QEMU says: {text}") from error
            raise

    def _filled(self, saved: tuple[Table, Packs] | None) -> Memory:
        """The machine's memory, with what it held when it was saved."""
        memory = Memory.find(self.vm.started.pid, str(self.template.memory), self.template.size)
        if saved is not None:
            self._last, packs = saved
            for number, pages in packs.pieces(self._last):
                memory.write(number, pages)
        return memory

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
        part = self.template.stored(batch)
        packs, permanent = batch.store.packs, frozenset(part["packs"])
        packs.learn([*part["packs"], *self._last.packs])
        table = self._save_memory(batch, look, permanent)
        # What a program freed was cleared: where the template has zeros too, such a page is as if it had never been written.
        table = table.of((table.pack != ZERO) | np.isin(table.number, self.template.table.number, assume_unique=True))
        names = {"table": batch.put(table.encode()), "devices": batch.put(devices)}
        record = {
            "format": FORMAT, "made_of": self.template.made_of, "template": part, **names, "packs": list(table.packs),
            "needs": sorted({part["table"], part["devices"], *part["packs"], *table.packs, *names.values()}),
        }  # fmt: skip
        content = int((table.pack != ZERO).sum()) * PAGE + len(devices)
        saved = Saved(batch.put(json.dumps(record).encode()), len(table.number), content)
        self._last = table
        if self._changed is not None:
            self._changed = self._changed[:0]
        return saved

    def _save_memory(self, batch: Batch, look: Look, permanent: frozenset[str]) -> Table:
        """The table of all pages that are not the template's."""
        packs, written = batch.store.packs, self.memory.written() if self._changed is not None else None
        if self._changed is None or written is None:
            number = self.memory.own_pages()
            return Writer(packs, batch, self._last, permanent).write(number, self.memory.read(number), look, MEMORY)
        # Noted before anything can fail: the kernel tells of a page once.
        self._changed = np.union1d(self._changed, written).astype(np.uint32)
        kept = still_good(self._last, self._changed, packs, permanent)
        number = np.union1d(self._changed, self._last.number[~kept]).astype(np.uint32)
        under = self._last.of(kept)
        writer = Writer(packs, batch, EMPTY, permanent | frozenset(under.packs))
        fresh = writer.write(number, self.memory.read(number), look, MEMORY)
        look(MEMORY, self._pieces(under.number))
        return overlaid(under, fresh)

    def _pieces(self, number: Numbers) -> Iterator[bytes]:
        for start in range(0, len(number), PACK_PAGES):
            yield self.memory.read(number[start : start + PACK_PAGES]).tobytes()

    def pids(self) -> list[int]:
        """See `protocol.Machine`."""
        return [self.vm.started.pid] if self.alive() else []

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
