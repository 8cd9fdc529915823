"""The `qemu` driver: virtual machines with a kernel of their own, saved and resumed whole, emulated (TCG) or on KVM where a guest boots there.

A template is booted once (`qemu_template.py`); each sandbox is a QEMU process that maps the template's memory privately and goes on from
its device state, so it starts in tens of milliseconds and shares what it does not write. A checkpoint holds the pages that it wrote. Who makes
several from one template finds the next process started ahead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perilune.errors import ConfigError
from perilune.sandbox.arrival import Arrival
from perilune.sandbox.drivers.cgroup import Group
from perilune.sandbox.drivers.keeper import Keeper
from perilune.sandbox.drivers.qemu_arriving import ArrivingMachine, OnItsWay
from perilune.sandbox.drivers.qemu_host import Host, find_out
from perilune.sandbox.drivers.qemu_machine import FORMAT, QemuMachine
from perilune.sandbox.drivers.qemu_process import KERNEL_LINE, Vm, program, spawn, tracking_library
from perilune.sandbox.drivers.qemu_template import Template, Templates
from perilune.sandbox.guest import build_image
from perilune.sandbox.guest.build_image import Image
from perilune.sandbox.pages import Packs, Table
from perilune.sandbox.protocol import Capabilities, DriverUnavailable, Limits, Mismatch, Probe, Spec, StoreDamaged
from perilune.sandbox.store import Store
from perilune.sandbox.template import first_difference

log = logging.getLogger(__name__)
MEMORY_STEP, LEAST_MEMORY = 64 << 20, 128 << 20
OVERHEAD_BYTES, OVERHEAD_THREADS = 256 << 20, 62
"""What the process may use beside the guest's memory: devices, translated code; and threads."""
KVM_SECONDS = 6.0
"""How long a guest may take to answer on KVM before it counts as not working there: a real one boots in one."""
CAPABILITIES = Capabilities(
    isolation="virtual machine",
    snapshot="machine",
    incremental=True,
    fork=True,
    guest_kernel=True,
    network=("none",),
    mounts=True,
)


class QemuDriver:
    """Makes `qemu` sandboxes.

    Args:
        folder: where its templates lie; guest images are in a folder of the user's (`guest/build_image.py`).
    """

    name = "qemu"
    contains = "machine"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keeper = Keeper()
        self.templates = Templates(folder / "templates", self.keeper)
        self._stores: dict[str, Store] = {}
        self._images: dict[str, Image] = {}
        self._ahead: dict[str, Vm] = {}
        self._made: Counter[str] = Counter()
        self._starter: threading.Thread | None = None
        self._closed = False
        self._version = ""
        self._found: Host | None = None
        self._lock = threading.RLock()

    def probe(self) -> Probe:
        """Boot a guest, run programs in it, save it, run programs in the restored one; says what of it failed."""
        from perilune.sandbox.drivers.probing import examine

        return examine(self, CAPABILITIES)

    def build(self, *, force: bool = True) -> list[Image]:
        """Build the guest images from the distribution's packages. Raises DriverUnavailable, saying what is missing."""
        with self._lock:
            self._images.clear()
        return [build_image.image(name, force=force) for name in build_image.VARIANTS]

    def template_hash(self, spec: Spec) -> str:
        """What a sandbox starts from, as `name=value` parts; a snapshot is resumed only where all are the same."""
        image = self._image(spec)
        host = self._host(image)
        return (
            f"mode={host.accelerator} mhz={round(host.khz / 1000)} qemu={self._qemu_version()} kernel={image.kernel_hash} image={image.image_hash} "
            f"memory={memory_bytes(spec.limits)} line={build_image.text_hash(KERNEL_LINE)}"
        )

    def _image(self, spec: Spec) -> Image:
        if spec.trees or spec.network != "none":
            what = f"tree {spec.trees[0]}" if spec.trees else f"network={spec.network}"
            raise ConfigError(
                f"{what}: a virtual machine sees no folder and no network of the host; put files into it (write_file) or into an image"
            )
        if spec.changes != "memory":
            raise ConfigError(
                f"changes={spec.changes}: a virtual machine's files are in its memory, and in its snapshots with it"
            )
        with self._lock:
            if spec.template not in self._images:
                self._images[spec.template] = build_image.image(spec.template)
            return self._images[spec.template]

    def _qemu_version(self) -> str:
        if not self._version:
            text = subprocess.run([program(), "--version"], capture_output=True, text=True, timeout=30).stdout
            found = re.search(r"version (\S+)", text)
            self._version = found[1] if found else "unknown"
        return self._version

    def _host(self, image: Image) -> Host:
        """What guests run on, found out once for a machine."""
        with self._lock:
            if self._found is None:
                self._found = find_out(
                    build_image.default_folder() / "host.json", [self._qemu_version(), image.kernel_hash],
                    lambda host: self.templates.boots(image, host, LEAST_MEMORY, KVM_SECONDS),
                )  # fmt: skip
            return self._found

    def make(self, sandbox: str, generation: str, spec: Spec, layer: str | None, blobs: str) -> QemuMachine:
        """Start a guest.

        Args:
            sandbox, generation: its names; the agent must answer with this generation.
            layer: blob of the saved machine to go on from, or None.
            blobs: the store's blob folder.

        Raises:
            DriverUnavailable: QEMU or a guest image is missing, or no guest boots.
            Mismatch: the machine was saved in another mode or from something else; names the field.
            StoreDamaged: a stored page is missing or damaged.
        """
        wanted = self.template_hash(spec)
        image, size = self._image(spec), memory_bytes(spec.limits)
        host = self._host(image)
        saved = None
        if layer is None:
            template = self.templates.get(wanted, image, host, size)
            devices = template.devices
        else:
            store = self._store(blobs)
            if (arrival := Arrival.of(store.root, layer=layer)) is not None:
                if (machine := self._arriving(sandbox, generation, spec, wanted, store, arrival)) is not None:
                    return machine
                arrival.wait()
            record = _checked(store, layer, wanted)
            try:
                template = self.templates.restore(record["template"], wanted, store)
                saved = Table.decode(store.read(record["table"]), record["packs"]), store.packs
                devices = store.read(record["devices"])
            except (KeyError, ValueError, TypeError) as error:
                raise StoreDamaged(f"saved machine {layer[:12]} is damaged: {error}") from None
        return self._continue(sandbox, generation, spec, template, saved, devices, host.accelerator)

    def _arriving(
        self, sandbox: str, generation: str, spec: Spec, wanted: str, store: Store, arrival: Arrival
    ) -> QemuMachine | None:
        """A machine of a snapshot that is still on its way, or None where its memory cannot be filled as it is touched."""
        if tracking_library() is None:
            return None
        record = _checked(store, arrival.snapshot.layer, wanted)
        part = record["template"]
        for name in (part["table"], part["devices"], record["table"], record["devices"]):
            arrival.have(name)
        saved = Table.decode(store.read(record["table"]), record["packs"])
        template = Template(
            part["id"], self.templates.place(part, wanted), wanted, part["size"], store.read(part["devices"]),
            Table.decode(store.read(part["table"]), part["packs"]),
        )  # fmt: skip
        if template.memory.exists():
            return None  # What differs from it is little.
        mode, begun, file = self._host(self._image(spec)).accelerator, time.monotonic(), os.memfd_create("memory")
        try:
            os.truncate(file, template.size)
            with self._in_group(sandbox, generation, spec, template) as group:
                vm = spawn(self.keeper, sandbox, mode, file, template.size, lazy=True)
        except BaseException:
            os.close(file)
            raise
        source = OnItsWay(
            arrival=arrival, file=file, saved=saved, packs=store.packs,
            restore=lambda: self.templates.restore(part, wanted, store),
        )  # fmt: skip
        devices = store.read(record["devices"])
        try:
            return ArrivingMachine(sandbox, generation, spec, vm, template, group, begun, devices, mode, source)
        except OSError as error:
            log.info("sandbox %s: its memory cannot be filled as it is touched: %s", sandbox, error)
            return None

    @contextlib.contextmanager
    def _in_group(self, sandbox: str, generation: str, spec: Spec, template: Template) -> Iterator[Group]:
        """A control group for a machine, gone again if it is not started."""
        outer = Limits(memory_bytes=template.size + OVERHEAD_BYTES, processes=OVERHEAD_THREADS, cpus=spec.limits.cpus)
        group = Group(f"perilune-{sandbox}-{generation[:8]}", outer)
        try:
            yield group
        except BaseException:
            group.remove()
            raise

    def _continue(
        self, sandbox: str, generation: str, spec: Spec, template: Template, saved: tuple[Table, Packs] | None, devices: bytes, mode: str
    ) -> QemuMachine:  # fmt: skip
        begun = time.monotonic()
        with self._in_group(sandbox, generation, spec, template) as group:
            vm = self._started(sandbox, template, mode)
        return QemuMachine(sandbox, generation, spec, vm, template, group, begun, saved, devices, mode)

    def _started(self, sandbox: str, template: Template, mode: str) -> Vm:
        """A QEMU over this template: the one that was started ahead, or a new one. From the second on, the next is started ahead."""
        with self._lock:
            vm = self._ahead.pop(template.id, None)
            self._made[template.id] += 1
        if vm is not None and not vm.started.alive():
            vm.end()
            vm = None
        if vm is None:
            vm = spawn(self.keeper, sandbox, mode, template.memory, template.size)
        vm.monitor.sandbox = sandbox
        with self._lock:
            idle = self._starter is None or not self._starter.is_alive()
            if self._made[template.id] > 1 and idle and not self._closed:
                self._starter = threading.Thread(target=self._start_ahead, args=(template, mode), daemon=True)
                self._starter.start()
        return vm

    def _start_ahead(self, template: Template, mode: str) -> None:
        with contextlib.suppress(DriverUnavailable):
            vm = spawn(self.keeper, "ahead", mode, template.memory, template.size)
            with self._lock:
                before = self._ahead.get(template.id)
                self._ahead[template.id] = vm
            if before is not None:
                before.end()

    def _store(self, blobs: str) -> Store:
        with self._lock:
            if blobs not in self._stores:
                self._stores[blobs] = Store(Path(blobs).parent, sync="none")
            return self._stores[blobs]

    def close(self) -> None:
        """End the keeper; machines that still live end with it."""
        with self._lock:
            self._closed = True
        if self._starter is not None:
            self._starter.join()  # Its start has a time limit.
        for vm in self._ahead.values():
            vm.end()
        self._ahead.clear()
        self.keeper.close()


def _checked(store: Store, layer: str, wanted: str) -> dict[str, Any]:
    """The description of a saved machine. Raises Mismatch unless it was made of what is wanted, StoreDamaged."""
    record = store.read_machine(layer)
    if record.get("format") != FORMAT or record.get("made_of") != wanted:
        name, recorded, needed = first_difference(str(record.get("made_of")), wanted)
        raise Mismatch(name, recorded, needed, f"saved machine {layer[:12]}")
    return record


def memory_bytes(limits: Limits) -> int:
    """The guest's memory: what was asked for, in steps, and not less than it boots with."""
    return max(LEAST_MEMORY, -(-limits.memory_bytes // MEMORY_STEP) * MEMORY_STEP)
