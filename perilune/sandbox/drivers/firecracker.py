"""The `firecracker` driver: virtual machines by Firecracker on KVM, saved by its full and diff snapshots. NOT RUN ON REAL KVM YET.

It is exercised against a double of Firecracker's API (`tests/sandbox/firecracker_double.py`). The probe boots a guest before anything
counts as working, and says that nobody has seen it work so far.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

from perilune.errors import ConfigError
from perilune.sandbox.arrival import Arrival
from perilune.sandbox.drivers.firecracker_machine import FORMAT, FirecrackerMachine, State, boot, read_state
from perilune.sandbox.drivers.keeper import Keeper
from perilune.sandbox.guest import build_image
from perilune.sandbox.guest.build_image import Image
from perilune.sandbox.protocol import Capabilities, DriverUnavailable, Mismatch, Probe, Spec, StoreDamaged
from perilune.sandbox.store import Store
from perilune.sandbox.template import first_difference

PROGRAM = "firecracker"
NOT_RUN = "not run on real KVM yet, only against a double of its API"
CAPABILITIES = Capabilities(
    isolation=f"virtual machine; {NOT_RUN}", snapshot="machine", incremental=True, fork=True, guest_kernel=True, network=("none",),
    mounts=True,
)  # fmt: skip
MEMORY_STEP, LEAST_MEMORY = 64 << 20, 128 << 20


class FirecrackerDriver:
    """Makes `firecracker` sandboxes.

    Args:
        folder: where its templates lie; guest images are in a folder of the user's.
    """

    name = "firecracker"
    contains = "machine"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keeper = Keeper()
        self._images: dict[str, Image] = {}
        self._version = ""
        self._lock = threading.RLock()

    def probe(self) -> Probe:
        """Boot a guest, run programs in it, save it, run programs in the restored one; says what of it failed."""
        from perilune.sandbox.drivers.probing import examine

        try:
            program()
            if not os.access("/dev/kvm", os.R_OK | os.W_OK):
                raise DriverUnavailable("firecracker: /dev/kvm cannot be opened for reading and writing")
        except DriverUnavailable as error:
            return Probe(driver=self.name, passed=False, reason=f"{error} ({NOT_RUN})")
        found = examine(self, CAPABILITIES)
        return replace(found, reason=f"{found.reason} ({NOT_RUN})")

    def template_hash(self, spec: Spec) -> str:
        """What a sandbox starts from, as `name=value` parts; a snapshot is resumed only where all are the same."""
        image = self._image(spec)
        if not self._version:
            text = subprocess.run([program(), "--version"], capture_output=True, text=True, timeout=30).stdout
            found = re.search(r"v?(\d+\.\d+\.\d+)", text)
            self._version = found[1] if found else "unknown"
        return f"mode=kvm firecracker={self._version} kernel={image.kernel_hash} image={image.image_hash} memory={_memory_bytes(spec)}"

    def _image(self, spec: Spec) -> Image:
        if spec.trees or spec.network != "none" or spec.changes != "memory":
            raise ConfigError(
                "a virtual machine sees no folder and no network of the host, and its files are in its memory: "
                f"trees={spec.trees}, network={spec.network}, changes={spec.changes}"
            )
        with self._lock:
            if spec.template not in self._images:
                self._images[spec.template] = build_image.image(spec.template)
            return self._images[spec.template]

    def make(self, sandbox: str, generation: str, spec: Spec, layer: str | None, blobs: str) -> FirecrackerMachine:
        """Start a guest from its template or from a saved machine.

        Raises:
            DriverUnavailable: Firecracker or a guest image is missing, or no guest boots.
            Mismatch: the machine was saved from something else; names the field.
            StoreDamaged: a stored page is missing or damaged.
        """
        wanted = self.template_hash(spec)
        scratch = self.folder / "scratch" / f"{sandbox}-{generation[:8]}"
        scratch.mkdir(parents=True)
        try:
            if layer is None:
                state = self._template(spec, wanted)
            else:
                store = Store(Path(blobs).parent, sync="none")
                if (arrival := Arrival.of(store.root, layer=layer)) is not None:
                    arrival.wait()
                record = store.read_machine(layer)
                if record.get("format") != FORMAT or record.get("made_of") != wanted:
                    name, recorded, needed = first_difference(str(record.get("made_of")), wanted)
                    raise Mismatch(name, recorded, needed, f"saved machine {layer[:12]}")
                try:
                    state = read_state(store, record, scratch)
                except (KeyError, ValueError, TypeError) as error:
                    raise StoreDamaged(f"saved machine {layer[:12]} is damaged: {error}") from None
            return FirecrackerMachine(self.keeper, program(), sandbox, generation, spec, scratch, state, wanted)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise

    def _template(self, spec: Spec, made_of: str) -> State:
        wanted = self.folder / "templates" / build_image.text_hash(made_of)
        with self._lock:
            if not wanted.is_dir():
                wanted.parent.mkdir(parents=True, exist_ok=True)
                building = Path(tempfile.mkdtemp(prefix="building-", dir=wanted.parent))
                try:
                    boot(self.keeper, program(), self._image(spec), _memory_bytes(spec), building)
                    (building / "template.json").write_text(json.dumps({"made_of": made_of}))
                    os.rename(building, wanted)
                finally:
                    shutil.rmtree(building, ignore_errors=True)
        return State(wanted / "devices", wanted / "memory", None)

    def close(self) -> None:
        """End the keeper; machines that still live end with it."""
        self.keeper.close()


def _memory_bytes(spec: Spec) -> int:
    return max(LEAST_MEMORY, -(-spec.limits.memory_bytes // MEMORY_STEP) * MEMORY_STEP)


def program() -> str:
    """Path of Firecracker. Raises DriverUnavailable, saying where to get it."""
    found = shutil.which(PROGRAM)
    if found is None:
        raise DriverUnavailable(
            f"firecracker: {PROGRAM} is not installed; put the release of github.com/firecracker-microvm/firecracker on the PATH"
        )
    return found
