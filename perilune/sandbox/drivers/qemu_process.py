"""A QEMU process: how it is started to boot a template or to continue from one, and what of it its owner holds."""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from perilune.sandbox.drivers.keeper import FIRST_FD, Keeper, Started
from perilune.sandbox.drivers.qemu_monitor import Monitor
from perilune.sandbox.guest.build_image import Image
from perilune.sandbox.native import compiled
from perilune.sandbox.protocol import DriverUnavailable, GuestLost

PROGRAM = "qemu-system-x86_64"
KERNEL_LINE = "quiet console=ttyS0 reboot=t panic=-1 init_on_free=1 random.trust_cpu=on tsc_early_khz={khz} tsc=reliable no_timer_check lpj=4000000"
"""The clock flags keep an emulated processor from waiting for good while it measures its clocks: it is told what the host's counter, which
it shows its guest, counts by. Freed memory is cleared, so that a secret goes with its process. A panic ends QEMU."""
_MACHINE = "microvm,x-option-roms=off,isa-serial=on,acpi=on,auto-kernel-cmdline=off,memory-backend=ram"
_SECCOMP = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_TRANSLATED_MB = 32
"""Room for translated code of one guest."""


def program() -> str:
    """Path of QEMU. Raises DriverUnavailable, saying how to install it."""
    found = shutil.which(PROGRAM)
    if found is None:
        raise DriverUnavailable(f"qemu: {PROGRAM} is not installed; apt-get install qemu-system-x86")
    return found


def tracking_library() -> Path | None:
    """What has QEMU's memory tracked, or None where it cannot be compiled."""
    return compiled(Path(__file__).with_name("qemu_memory.c"))


@dataclass(slots=True)
class Vm:
    """A started QEMU.

    Attributes:
        started: the process.
        monitor: its control socket.
        agent: the host's end of the guest's port.
        errors: descriptor of a memory file with what it printed.
    """

    started: Started
    monitor: Monitor
    agent: socket.socket
    errors: int

    def end(self) -> None:
        """Kill it and free what is held of it; a second call does nothing."""
        self.started.end()
        self.monitor.close()
        self.agent.close()
        if self.errors >= 0:
            os.close(self.errors)
            self.errors = -1


def said(errors: int) -> str:
    """The end of what QEMU printed."""
    size = os.fstat(errors).st_size
    return os.pread(errors, 2000, max(0, size - 2000)).decode(errors="replace").strip()


def spawn(
    keeper: Keeper, sandbox: str, accelerator: str, memory: Path | int, size: int, *, boot: tuple[Image, Path, int] | None = None,
    lazy: bool = False,
) -> Vm:  # fmt: skip
    """Start QEMU.

    Args:
        sandbox: for messages and the process's name.
        accelerator: "tcg" or "kvm".
        memory: a file or its descriptor, mapped privately; where it boots, that of an empty file, which is written.
        size: of the memory in bytes.
        lazy: its owner fills the memory, which is an empty file's, as it is touched (`lazy_memory.py`).
        boot: image, a file for the console's text, and what the time stamp counter counts in a millisecond; None = wait for a device state.

    Raises:
        DriverUnavailable: it does not start; the message holds what it said.
    """
    where = f"/proc/self/fd/{FIRST_FD + 2}" if isinstance(memory, int) else _quoted(memory)
    backend = f"memory-backend-file,id=ram,size={size},mem-path={where},share={'on' if boot else 'off'}"
    argv = [
        program(), "-name", f"perilune-{sandbox}", "-M", _MACHINE, "-m", f"{size >> 20}M", "-object", backend, "-smp", "1",
        "-accel", f"tcg,thread=single,tb-size={_TRANSLATED_MB}" if accelerator == "tcg" else accelerator,
        "-cpu", "max" if accelerator == "tcg" else "host,-arch-capabilities",
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-sandbox", _SECCOMP,
        "-serial", "chardev:console", "-chardev", f"file,id=console,path={_quoted(boot[1])}" if boot else "null,id=console",
        "-chardev", f"socket,id=agent,fd={FIRST_FD}", "-device", "virtio-serial-device,max_ports=2",
        "-device", "virtserialport,chardev=agent,name=perilune,nr=1",
        "-chardev", f"socket,id=monitor,fd={FIRST_FD + 1}", "-mon", "chardev=monitor,mode=control",
        # A device state is loaded without the part that names the machine; the templates' hash stands for it.
        "-global", "migration.send-configuration=off",
    ]  # fmt: skip
    if boot:
        argv += ["-kernel", boot[0].kernel, "-initrd", boot[0].initrd, "-append", KERNEL_LINE.format(khz=boot[2])]
    else:
        argv += ["-incoming", "defer"]
    library = None if boot else tracking_library()
    tracking = {"LD_PRELOAD": str(library), "PERILUNE_MEMORY_BYTES": str(size)} if library is not None else {}
    if lazy:
        tracking["PERILUNE_MEMORY_MISSING"] = "1"
    agent, its_agent = socket.socketpair()
    control, its_control = socket.socketpair()
    errors = os.memfd_create("qemu")
    started: Started | None = None
    try:
        fds = [its_agent.fileno(), its_control.fileno(), *([memory] if isinstance(memory, int) else [])]
        started = keeper.start(argv, fds, errors, environment=tracking)
        its_agent.close()
        its_control.close()
        return Vm(started, Monitor(sandbox, control), agent, errors)
    except BaseException as error:
        text = said(errors)
        if started is not None:
            started.end()
        for sock in (agent, its_agent, control, its_control):
            sock.close()
        os.close(errors)
        if isinstance(error, GuestLost):
            raise DriverUnavailable(f"qemu: it does not start: {text or error}") from error
        raise


def _quoted(path: Path) -> str:
    return str(path).replace(",", ",,")
