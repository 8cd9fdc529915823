"""A probe that runs something: a driver counts as working only after programs have run in a sandbox and in its restored copy."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import uuid
from pathlib import Path

from perilune.errors import PeriluneError
from perilune.sandbox.drivers.running import Running
from perilune.sandbox.protocol import Capabilities, Driver, Limits, Machine, Probe, Spec
from perilune.sandbox.store import Store

PROBE_SECONDS = 20.0
LIMITS = Limits(memory_bytes=128 << 20, disk_bytes=16 << 20, processes=32)
FIRST = """set -e
mkdir /workspace/a && echo one > /workspace/a/b && rm -r /etc/alternatives && mkdir /etc/alternatives
test -z "$(ls /etc/alternatives)"
test "$(id -u)" = 0 && test "$$" -lt 1000
! mount -t tmpfs none /mnt 2>/dev/null
"""
SECOND = 'test "$(cat /workspace/a/b)" = one && test -z "$(ls /etc/alternatives)" && test ! -e /workspace/never'
"""The first leaves files and deletes a template's folder; the second must find just that."""
MACHINE_FIRST = """set -e
echo one > /workspace/a && mount -t tmpfs none /mnt && echo two > /mnt/b && test "$(id -u)" = 0
sleep 1000 > /dev/null 2>&1 & echo $! > /workspace/process
"""
MACHINE_SECOND = 'test "$(cat /workspace/a)" = one && test "$(cat /mnt/b)" = two && kill -0 "$(cat /workspace/process)"'
"""Of a machine that is saved whole: files, a mount and a process must go on."""


def examine(driver: Driver, capabilities: Capabilities) -> Probe:
    """Make, run, save, restore and run again, in a folder of its own; what fails is the reason."""
    # A machine boots a template: the one that users get.
    spec = Spec() if driver.contains == "machine" else Spec(limits=LIMITS)
    first, second = (MACHINE_FIRST, MACHINE_SECOND) if driver.contains == "machine" else (FIRST, SECOND)
    folder = Path(tempfile.mkdtemp(prefix="perilune-probe-"))
    try:
        store = Store(folder / "store", sync="none")
        blobs = str(store.root / "blobs")
        with contextlib.closing(_Closing(driver.make("probe", uuid.uuid4().hex, spec, None, blobs))) as held:
            _run(held.machine, first)
            held.machine.freeze()
            with store.writing() as batch:
                saved = held.machine.save(batch, lambda where, pieces: None).layer
            held.machine.thaw()
            _run(held.machine, "true")
        with contextlib.closing(_Closing(driver.make("probe", uuid.uuid4().hex, spec, saved, blobs))) as held:
            _run(held.machine, second)
            guarantees = held.machine.guarantees
    except (PeriluneError, OSError) as error:
        return Probe(driver=driver.name, passed=False, reason=str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Probe(
        driver=driver.name, passed=True, reason="ran programs in a sandbox, in it after a checkpoint, and in its restored copy",
        capabilities=capabilities, guarantees=guarantees,
    )  # fmt: skip


class _Closing:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def close(self) -> None:
        self.machine.destroy()


def _run(machine: Machine, script: str) -> None:
    with contextlib.closing(
        machine.start(["/bin/sh", "-c", script], {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}, "/")
    ) as process:
        running = Running(process, b"", time.monotonic() + PROBE_SECONDS, 4096)
        for _ in running.outputs():
            pass
        done = process.finish()
    if done["code"] != 0 or running.timed_out:
        said = bytes(running.kept["stderr"]).decode(errors="replace").strip()
        raise OSError(f"a program in the sandbox ended with {done['code']}: {said or script.strip().splitlines()[-1]}")
