"""Templates: a machine that was booted once and stands still; sandboxes are private copies of its memory that go on from there.

    templates/KEY-ID/ram              the memory, as the machine left it
    templates/KEY-ID/devices          state of processor and devices
    templates/KEY-ID/packs, table     the same memory as a snapshot store keeps it; stores on this file system share these files
    templates/KEY-ID/template.json    what it was made of; written before the folder gets its name

A snapshot holds what differs from its template, and the template too: where the folder is gone it is made again from the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perilune.sandbox.drivers.agent_channel import Channel
from perilune.sandbox.drivers.keeper import Keeper
from perilune.sandbox.drivers.qemu_host import Host
from perilune.sandbox.drivers.qemu_process import said, spawn
from perilune.sandbox.drivers.running import Running
from perilune.sandbox.guest.build_image import Image
from perilune.sandbox.page_names import PAGE, Pages
from perilune.sandbox.page_writer import Writer
from perilune.sandbox.pages import PACK_PAGES, Numbers, Packs, Table
from perilune.sandbox.protocol import DriverUnavailable, GuestLost
from perilune.sandbox.store import Batch, Store

BOOT_SECONDS = (40.0, 60.0, 90.0)
"""Time limits of the tries: an emulated boot is known to stand still for good once in a while."""
WARM_SECONDS = 60.0
WARM = {"python": ["python3", "-c", "import json, os, socket, subprocess, sys"]}
"""What runs in a template before it is taken, so that its copies find these programs in memory. All run `true` in a shell."""
LIMITS = {"disk_bytes": 64 << 20, "processes": 256, "open_files": 1024}


@dataclass(frozen=True, slots=True)
class Template:
    """A template on this machine.

    Attributes:
        id: hash of its memory and devices.
        folder: its files.
        made_of: mode, QEMU, kernel, image and memory as `name=value` parts.
        size: bytes of memory.
        devices: state to continue from.
        table: which pages are not zeros.
    """

    id: str
    folder: Path
    made_of: str
    size: int
    devices: bytes
    table: Table

    @property
    def memory(self) -> Path:
        """The file that copies map."""
        return self.folder / "ram"

    def stored(self, batch: Batch) -> dict[str, Any]:
        """The template's part of a snapshot: table and packs of its memory, stored if they are not yet.

        Raises:
            StoreFull: it does not fit.
        """
        for name in self.table.packs:
            batch.put_file(name, Packs(self.folder / "packs").path(name))
        return {
            "id": self.id, "size": self.size, "table": batch.put(self.table.encode()), "packs": list(self.table.packs),
            "devices": batch.put(self.devices),
        }  # fmt: skip


def nonzero_pages(file: Path | int) -> Iterator[tuple[Numbers, Pages]]:
    """Pages of a memory file, or of its descriptor, that are not zeros: in pieces, in order."""
    step = PACK_PAGES * 16 * PAGE
    fd = os.open(file, os.O_RDONLY) if isinstance(file, Path) else os.dup(file)
    try:
        for start in range(0, os.fstat(fd).st_size, step):
            pages = np.frombuffer(os.pread(fd, step, start), np.uint8).reshape(-1, PAGE)
            held = np.flatnonzero(pages.view(np.uint64).any(axis=1))
            if len(held):
                yield (held + start // PAGE).astype(np.uint32), pages[held]
    finally:
        os.close(fd)


def _write_pages(fd: int, number: Numbers, pages: Pages) -> None:
    first = np.flatnonzero(np.diff(number.astype(np.int64), prepend=-2) != 1)
    for start, end in zip(first, np.append(first[1:], len(number))):
        os.pwrite(fd, pages[start:end], int(number[start]) * PAGE)


class _Folder:
    """Takes packs like a store's batch, into a template's folder."""

    def __init__(self, folder: Path) -> None:
        self.packs = Packs(folder / "packs")

    def put_named(self, name: str, *parts: bytes | memoryview) -> bool:
        path = self.packs.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(parts))
        return True


def _key(made_of: str) -> str:
    return hashlib.sha256(made_of.encode()).hexdigest()[:16]


class Templates:
    """The templates of one folder, shared by all processes that use it.

    Args:
        folder: made if missing.
        keeper: starts QEMU.
    """

    def __init__(self, folder: Path, keeper: Keeper) -> None:
        self.folder, self.keeper = folder, keeper
        self._known: dict[str, Template] = {}

    def _load(self, folder: Path) -> Template | None:
        if folder.name not in self._known:
            try:
                values = json.loads((folder / "template.json").read_text())
                devices = (folder / "devices").read_bytes()
                table = Table.decode((folder / "table").read_bytes(), values["packs"])
                if (folder / "ram").stat().st_size != values["size"]:
                    return None
            except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
                return None
            self._known[folder.name] = Template(values["id"], folder, values["made_of"], values["size"], devices, table)
        known = self._known[folder.name]
        return known if known.memory.exists() else None

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def current(self, made_of: str) -> Template | None:
        """A template that was made of this, or None."""
        for folder in sorted(self.folder.glob(f"{_key(made_of)}-*")):
            if (found := self._load(folder)) is not None:
                return found
        return None

    def get(self, made_of: str, image: Image, host: Host, size: int) -> Template:
        """The template that is made of this, booted if there is none.

        Raises:
            DriverUnavailable: no try led to a guest that answers; the message holds what the last one printed.
        """
        if (found := self.current(made_of)) is not None:
            return found
        with self._locked(_key(made_of)):
            if (found := self.current(made_of)) is not None:
                return found
            failure = ""
            for seconds in BOOT_SECONDS:
                with self._building() as folder:
                    try:
                        self._boot(folder, image, host, size, seconds)
                    except GuestLost as error:
                        failure = f"{error}; {(folder / 'console').read_text(errors='replace').strip()[-300:]}"
                        continue
                    return self._adopt(folder, made_of, size, _packed(folder))
            raise DriverUnavailable(f"qemu: no guest answered in {len(BOOT_SECONDS)} boots: {failure}")

    def boots(self, image: Image, host: Host, size: int, seconds: float) -> bool:
        """Whether a guest answers at all on this host."""
        with self._building() as folder:
            try:
                self._boot(folder, image, host, size, seconds)
            except (GuestLost, DriverUnavailable):
                return False
            return True

    def place(self, part: dict[str, Any], made_of: str) -> Path:
        """Where the template of a snapshot is, or would be."""
        return self.folder / f"{_key(made_of)}-{part['id']}"

    def restore(self, part: dict[str, Any], made_of: str, store: Store) -> Template:
        """The template of a snapshot, from its folder or made again from the store.

        Raises:
            StoreDamaged: it is not whole there.
        """
        place = self.place(part, made_of)
        if (found := self._load(place)) is not None:
            return found
        with self._locked(_key(made_of)):
            if (found := self._load(place)) is not None:
                return found
            with self._building() as folder:
                table = Table.decode(store.read(part["table"]), part["packs"])
                with open(folder / "ram", "wb") as memory:
                    memory.truncate(part["size"])
                    for number, pages in store.packs.pieces(table):
                        _write_pages(memory.fileno(), number, pages)
                for pack in table.packs:
                    _share(store.blob_path(pack), Packs(folder / "packs").path(pack))
                (folder / "devices").write_bytes(store.read(part["devices"]))
                return self._adopt(folder, made_of, part["size"], table)

    @contextlib.contextmanager
    def _building(self) -> Iterator[Path]:
        self.folder.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="building-", dir=self.folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _boot(self, folder: Path, image: Image, host: Host, size: int, seconds: float) -> None:
        """Boot, warm up, stop; leaves `ram` and `devices`. Raises GuestLost."""
        # In memory until it is done: a boot clears all of its memory, of which most is worth no room on a disk.
        memory = os.memfd_create("memory")
        try:
            os.truncate(memory, size)
            (folder / "console").touch()
            self._run_boot(folder, image, host, memory, size, seconds)
            with open(folder / "ram", "wb") as kept:
                kept.truncate(size)
                for number, pages in nonzero_pages(memory):
                    _write_pages(kept.fileno(), number, pages)
        finally:
            os.close(memory)

    def _run_boot(self, folder: Path, image: Image, host: Host, memory: int, size: int, seconds: float) -> None:
        vm = spawn(self.keeper, "template", host.accelerator, memory, size, boot=(image, folder / "console", host.khz))
        channel = Channel("template", vm.agent)
        try:
            channel.hello(uuid.uuid4().hex, os.urandom(64), LIMITS, "template", seconds)
            for argv in (["sh", "-c", "true"], WARM.get(image.name)):
                if argv is not None:
                    _run(channel, argv)
            channel.quiesce(overwrite=True)
            vm.monitor.execute("stop")
            (folder / "devices").write_bytes(vm.monitor.save_devices())
        except GuestLost as error:
            raise GuestLost(f"{error} {said(vm.errors)}") from error
        finally:
            channel.close()
            vm.end()

    def _adopt(self, folder: Path, made_of: str, size: int, table: Table) -> Template:
        (folder / "table").write_bytes(table.encode())
        devices = (folder / "devices").read_bytes()
        name = hashlib.sha256(table.encode() + " ".join(table.packs).encode() + devices).hexdigest()[:24]
        values = {"id": name, "made_of": made_of, "size": size, "packs": list(table.packs), "created": time.time()}
        (folder / "template.json").write_text(json.dumps(values))
        wanted = self.folder / f"{_key(made_of)}-{name}"
        with contextlib.suppress(OSError):  # It is there already: the same content.
            os.rename(folder, wanted)
        found = self._load(wanted)
        assert found is not None, "a template that was just made can be read"
        return found


def _packed(folder: Path) -> Table:
    """Write a template's packs from its memory."""
    kept, numbers, pieces = _Folder(folder), [], []
    for number, pages in nonzero_pages(folder / "ram"):
        numbers.append(number)
        pieces.append(pages)
    return Writer(kept.packs, kept).write(
        np.concatenate(numbers), np.concatenate(pieces), lambda where, pieces: None, "template"
    )


def _share(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)


def _run(channel: Channel, argv: list[str]) -> None:
    command = channel.start(argv, {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, "/")
    with contextlib.closing(command):
        for _ in Running(command, b"", time.monotonic() + WARM_SECONDS, 0).outputs():
            pass
        if (done := command.finish())["code"] not in (0, 127):
            raise GuestLost(f"{argv[0]} ended with {done['code']}")
