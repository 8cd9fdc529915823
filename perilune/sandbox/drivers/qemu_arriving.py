"""A machine that runs before its snapshot has arrived: its memory is filled from the store, and from other stores, as it is touched."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from perilune.sandbox.arrival import Arrival
from perilune.sandbox.drivers.agent_channel import Channel
from perilune.sandbox.drivers.cgroup import Group
from perilune.sandbox.drivers.lazy_memory import LazyMemory, descriptor
from perilune.sandbox.drivers.memory import Memory
from perilune.sandbox.drivers.qemu_machine import QemuMachine
from perilune.sandbox.drivers.qemu_process import Vm
from perilune.sandbox.drivers.qemu_template import Template
from perilune.sandbox.pages import Packs, Table, overlaid
from perilune.sandbox.protocol import GuestLost, Spec


@dataclass(frozen=True, kw_only=True)
class OnItsWay:
    """What such a machine is made from.

    Attributes:
        arrival: of its snapshot.
        file: descriptor of the empty file that QEMU maps; closed with the machine.
        saved: pages that differ from the template.
        packs: of the store that it arrives in.
        restore: makes the template once all of it is there.
    """

    arrival: Arrival
    file: int
    saved: Table
    packs: Packs
    restore: Callable[[], Template]


class ArrivingMachine(QemuMachine):
    """See the module. Whoever wants to save it waits until all of it is there.

    Args:
        template: not on this machine yet; its table and devices are.
        source: where its memory comes from.
        The others as for `QemuMachine`.

    Raises:
        OSError: this process may not fill QEMU's memory.
    """

    _lazy: LazyMemory | None = None

    def __init__(
        self, sandbox: str, generation: str, spec: Spec, vm: Vm, template: Template, group: Group, begun: float, devices: bytes,
        accelerator: str, source: OnItsWay,
    ) -> None:  # fmt: skip
        self.source = source
        super().__init__(sandbox, generation, spec, vm, template, group, begun, None, devices, accelerator)

    def _filled(self, saved: tuple[Table, Packs] | None) -> Memory:
        source, started = self.source, self.vm.started
        memory = Memory.find(started.pid, f"/proc/self/fd/{source.file}", self.template.size)
        faults = descriptor(started.pidfd)
        self._last = source.saved
        table = overlaid(self.template.table, source.saved)
        self._lazy = LazyMemory(memory, faults, table, source.packs, source.arrival.have, started.kill)
        return memory

    @property
    def channel(self) -> Channel:
        """To the agent. Raises GuestLost once the guest has ended, saying what of its memory could not be had."""
        if self._lazy is not None and self._lazy.failure:
            raise GuestLost(f"sandbox {self.sandbox}: {self._lazy.failure}")
        return super().channel

    def freeze(self) -> int:
        """Have the guest stand still, once all of it is here. Raises SandboxError if that will not be."""
        assert self._lazy is not None, "a machine that is frozen has begun"
        self._lazy.wait()
        self.source.arrival.wait()
        if not self.template.memory.exists():
            self.template = self.source.restore()
        return super().freeze()

    def destroy(self) -> None:
        """End it at once and free all of it."""
        if self._ended:
            return
        super().destroy()
        if self._lazy is not None:
            self._lazy.close()
        os.close(self.source.file)
