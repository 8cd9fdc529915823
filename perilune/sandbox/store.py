"""The snapshot store: blobs named by their hash, and snapshots that name the blobs they need.

    blobs/ab/cdef…       pieces of files (64 KiB; a piece of zeros is not stored), packs of memory pages (`pages.py`), and layers: JSON
                         lists of entries of files, or a JSON object of a machine whose "needs" are all blobs that it is made of
    snapshots/ID.json    written last; a snapshot exists once its file does. Its last line is the hash of the rest.
    usage                bytes of all blobs, so that the limit holds for all processes together
    lock                 shared while a snapshot is written, exclusive while blobs are collected

A killed writer leaves blobs that no snapshot names, or temporary files; `collect` removes both. Nothing is changed in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.errors import ConfigError, SandboxError
from perilune.sandbox.guest import layer, linux
from perilune.sandbox.protocol import NoSuchSandbox, StoreDamaged, StoreFull

if TYPE_CHECKING:
    from perilune.sandbox.pages import Packs

FORMAT = 1
SYNCS = ("none", "batch", "full")
"""none: the kernel writes when it likes (a power cut may cost the snapshot, and a reader will notice). batch: one flush of the file
system before a snapshot is published. full: every blob and folder is synced by itself."""
AHEAD = 1 << 20
"""Bytes that a writer counts in advance; what it does not use it gives back, and what a killed one had is freed by `collect`."""
MOST_PARTS = 1024
"""Of one call (IOV_MAX)."""
SMALL = 512
"""Bytes of a file system block: what a blob is counted as at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A published snapshot.

    Attributes:
        id: its name.
        sandbox, generation: what it was taken of.
        driver, machine, contains: which driver can resume it, on which processor, and whether it holds files or a whole machine.
        template_hash, spec: what the sandbox was made from.
        layer: blob with the entries of its changed files.
        parent: the snapshot before it, or None; only a note, for it stands on its own.
        created: seconds since 1970.
        entries, bytes, new_bytes: changed files, their stored content, and what of it was not in the store before.
        processes: processes that ran when it was taken; a snapshot of files does not bring them back.
    """

    id: str
    sandbox: str
    generation: str
    driver: str
    machine: str
    contains: str
    template_hash: str
    spec: dict[str, Any]
    layer: str
    parent: str | None
    created: float
    entries: int
    bytes: int
    new_bytes: int
    processes: int
    format: int = FORMAT


@dataclass(slots=True)
class Batch:
    """Blobs of a snapshot that is being written, from `Store.writing`."""

    store: Store
    new_bytes: int = 0
    credit: int = 0
    fresh: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, data: bytes) -> str:
        """Store a blob unless it is there; returns its name.

        Raises:
            StoreFull: it would pass the store's limit, or the disk is full.
        """
        name = layer.digest(data)
        self.put_named(name, data)
        return name

    def put_named(self, name: str, *parts: bytes | memoryview) -> bool:
        """Store a blob whose name is known, which may be a pack's, given in parts; returns whether it was not there yet. Raises as `put`."""
        path = f"{self.store.root}/blobs/{name[:2]}/{name[2:]}"
        length = sum(len(part) for part in parts)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_size == length:
                return False
        self._count(path, length, max(length, SMALL))
        self.store.write_file(path, *parts)
        return True

    def put_file(self, name: str, file: Path) -> None:
        """Store a file whose name as a blob is known; it must never change. On one file system it is shared, not copied. Raises as `put`."""
        path = self.store.blob_path(name)
        if path.exists():
            return
        size = file.stat().st_size
        self._count(str(path), size, size)
        path.parent.mkdir(exist_ok=True)
        try:
            os.link(file, path)
        except OSError:  # Another file system, or one without links.
            self.store.write_file(path, file.read_bytes())
            return
        if self.store.sync == "full":
            _sync_folder(path)

    def _count(self, path: str, length: int, size: int) -> None:
        """Count a new blob. Raises StoreFull."""
        with self._lock:
            if self.credit < size:
                self._borrow(size)
            self.credit -= size
            self.new_bytes += length
            self.fresh.append(path)

    def _borrow(self, size: int) -> None:
        """Count bytes against the limit ahead of their use, so that not every blob takes the lock."""
        with contextlib.suppress(StoreFull):
            self.store.reserve(size + AHEAD)
            self.credit += size + AHEAD
            return
        self.store.reserve(size - self.credit)
        self.credit = size

    def publish(self, snapshot: Snapshot) -> None:
        """Make the snapshot exist, after everything that it names is written (and synced, as the store is told to)."""
        if self.store.sync == "batch":
            fd = os.open(self.store.root, os.O_RDONLY)
            try:
                linux.sync_file_system(fd)
            finally:
                os.close(fd)
        elif self.store.sync == "full":
            for folder in {os.path.dirname(path) for path in self.fresh} | {f"{self.store.root}/blobs"}:
                _sync_folder(folder)
        body = json.dumps(asdict(snapshot), sort_keys=True)
        text = f"{body}\n{layer.digest(body.encode())}\n"
        self.store.write_file(self.store.snapshot_path(snapshot.id), text.encode(), sync=self.store.sync != "none")
        if self.store.sync != "none":
            _sync_folder(self.store.root / "snapshots")


class Store:
    """A folder with blobs and snapshots; several processes may use it at once.

    Args:
        root: the folder; made if missing, readable by its owner only.
        sync: one of `SYNCS`.
        max_bytes: most bytes of blobs; counts what is not collected yet, too.
    """

    def __init__(self, root: Path, *, sync: str = "batch", max_bytes: int = 64 << 30) -> None:
        if sync not in SYNCS:
            raise ConfigError(f"sync={sync!r} is not one of {', '.join(SYNCS)}")
        self.root, self.sync, self.max_bytes = root, sync, max_bytes
        for name in ("blobs", "snapshots", "tmp"):
            (root / name).mkdir(parents=True, exist_ok=True)
        os.chmod(root, 0o700)
        self._folders: set[str] = set()

    @functools.cached_property
    def packs(self) -> Packs:
        """Memory pages in this store."""
        from perilune.sandbox.pages import Packs  # With it comes NumPy, which files do without.

        return Packs.of(self.root / "blobs")

    def blob_path(self, name: str) -> Path:
        """Where a blob lies."""
        return self.root / "blobs" / name[:2] / name[2:]

    def snapshot_path(self, name: str) -> Path:
        """Where a snapshot's record lies. Raises SandboxError for a name that no snapshot can have."""
        if not name.startswith("snap-") or not name.removeprefix("snap-").isalnum():
            raise SandboxError(f"{name!r} is no snapshot's name; they look like snap-0123456789ab")
        return self.root / "snapshots" / f"{name}.json"

    def new_id(self) -> str:
        """A fresh snapshot name."""
        return f"snap-{secrets.token_hex(8)}"

    @contextlib.contextmanager
    def _locked(self, kind: int, name: str = "lock") -> Iterator[int]:
        fd = os.open(self.root / name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, kind)
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Batch]:
        """Write blobs and publish; keeps collection away meanwhile."""
        with self._locked(fcntl.LOCK_SH):
            batch = Batch(self)
            try:
                yield batch
            finally:
                if batch.credit:
                    self.reserve(-batch.credit)

    def write_file(self, path: str | Path, *parts: bytes | memoryview, sync: bool | None = None) -> None:
        """Write parts under a temporary name and rename, so that a reader sees all of it or nothing."""
        temporary = f"{self.root}/tmp/{secrets.token_hex(12)}"
        try:
            folder = os.path.dirname(path)
            if folder not in self._folders:
                os.makedirs(folder, exist_ok=True)
                self._folders.add(folder)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                _write_all(fd, parts)
                if self.sync == "full" if sync is None else sync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise StoreFull(
                f"cannot write to the snapshot store {self.root}: {error.strerror}; free some space there"
            ) from error

    def reserve(self, count: int) -> None:
        """Count bytes against the limit of the store, over all processes; less than zero gives back. Raises StoreFull."""
        with self._locked(fcntl.LOCK_EX, "usage") as fd:
            used = int(os.pread(fd, 32, 0) or b"0")
            if count > 0 and used + count > self.max_bytes:
                raise StoreFull(
                    f"the snapshot store {self.root} holds {used} bytes and may hold {self.max_bytes}; "
                    f"{count} more do not fit. Remove snapshots (perilune sandbox rm), which frees what no other one uses"
                )
            os.pwrite(fd, b"%-31d" % max(0, used + count), 0)

    def used_bytes(self) -> int:
        """Bytes counted against the limit."""
        with self._locked(fcntl.LOCK_EX, "usage") as fd:
            return int(os.pread(fd, 32, 0) or b"0")

    def read(self, name: str) -> bytes:
        """A blob's content, checked. Raises StoreDamaged, naming the blob."""
        try:
            data = self.blob_path(_blob_name(name)).read_bytes()
        except FileNotFoundError:
            raise StoreDamaged(f"snapshot store {self.root}: blob {name} is missing") from None
        except ValueError as error:
            raise StoreDamaged(f"snapshot store {self.root}: {error}") from None
        if not is_named(name, data):
            raise StoreDamaged(f"snapshot store {self.root}: blob {name} is corrupt: its content has another hash")
        return data

    def read_layer(self, name: str) -> list[dict[str, Any]]:
        """The entries of a layer of files, checked. Raises StoreDamaged."""
        try:
            entries = json.loads(self.read(name))
            if not isinstance(entries, list):
                raise ValueError("it is a machine")
            for entry in entries:
                layer.check(entry)
        except (ValueError, TypeError) as error:
            raise StoreDamaged(f"snapshot store {self.root}: layer {name} is no list of entries: {error}") from None
        return entries

    def snapshots(self) -> list[str]:
        """Names of all snapshots."""
        return sorted(path.stem for path in (self.root / "snapshots").glob("snap-*.json"))

    def snapshot(self, name: str) -> Snapshot:
        """A snapshot's record. Raises SandboxError for an unknown name, StoreDamaged for a record that is not whole."""
        path = self.snapshot_path(name)
        try:
            return parse_record(path.read_bytes(), f"snapshot {name} ({path})")
        except FileNotFoundError:
            from perilune.sandbox.arrival import Arrival

            if (arrival := Arrival.of(self.root, snapshot=name)) is not None:
                return arrival.snapshot
            known = ", ".join(self.snapshots()[:8]) or "none"
            raise NoSuchSandbox(f"there is no snapshot {name!r} in {self.root}; there are: {known}") from None

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """A second snapshot of the same content, with its own life; no content is written."""
        from perilune.sandbox.arrival import Arrival

        if (arrival := Arrival.of(self.root, snapshot=snapshot.id)) is not None:
            arrival.wait()
        with self.writing() as batch:
            made = replace(snapshot, id=self.new_id(), parent=snapshot.id, created=time.time(), new_bytes=0)
            self.needs(snapshot)
            batch.publish(made)
            return made

    def read_machine(self, name: str) -> dict[str, Any]:
        """The description of a saved machine, as its driver wrote it. Raises StoreDamaged."""
        try:
            found = json.loads(self.read(name))
            if not isinstance(found, dict) or not isinstance(found["needs"], list):
                raise ValueError("it is no object with a list of needs")
            for blob in found["needs"]:
                _blob_name(blob)
        except (ValueError, TypeError, KeyError) as error:
            raise StoreDamaged(f"snapshot store {self.root}: layer {name} is no saved machine: {error}") from None
        return found

    def needs(self, snapshot: Snapshot) -> set[str]:
        """All blobs that a snapshot is made of. Raises StoreDamaged."""
        if snapshot.contains == "machine":
            return {snapshot.layer, *self.read_machine(snapshot.layer)["needs"]}
        entries = self.read_layer(snapshot.layer)
        return {snapshot.layer} | {name for entry in entries for name in entry.get("chunks", ()) if name is not None}

    def references(self, without: Iterable[str] = ()) -> Counter[str]:
        """How many snapshots need each blob.

        Raises:
            StoreDamaged: a snapshot cannot be read, so what it needs is not known.
        """
        count: Counter[str] = Counter()
        for name in set(self.snapshots()) - set(without):
            count.update(self.needs(self.snapshot(name)))
        return count

    def delete(self, names: Sequence[str]) -> int:
        """Remove snapshots and the blobs that only they needed; returns the bytes freed.

        Raises:
            SandboxError: one of them does not exist; nothing was removed.
        """
        with self._locked(fcntl.LOCK_EX):
            paths = [self.snapshot_path(name) for name in names]
            for name, path in zip(names, paths):
                if not path.exists():
                    raise NoSuchSandbox(f"there is no snapshot {name!r} in {self.root}")
            for path in paths:
                path.unlink()
        return self.collect()

    def collect(self) -> int:
        """Remove blobs that no snapshot needs and leftovers of killed writers; returns the bytes freed.

        With a damaged snapshot in the store nothing is removed: what it needs is not known. Delete or mend it first.
        """
        with self._locked(fcntl.LOCK_EX):
            needed, freed, kept = self.references(), 0, 0
            for path in self._blob_paths():
                size = path.stat().st_size
                if needed[path.parent.name + path.name] == 0:
                    path.unlink()
                    freed += size
                else:
                    kept += max(size, SMALL)
            for path in (self.root / "tmp").iterdir():
                path.unlink(missing_ok=True)  # Writers hold the shared lock, so none is at work.
            with self._locked(fcntl.LOCK_EX, "usage") as fd:
                os.pwrite(fd, b"%-31d" % kept, 0)
            return freed

    def export(self, name: str) -> bytes:
        """The record of a snapshot as `import_snapshot` takes it. Raises as `snapshot`."""
        self.snapshot(name)
        return self.snapshot_path(name).read_bytes()

    def missing(self, name: str) -> set[str]:
        """Blobs that a snapshot needs and that are not here; the layer alone while that is missing. Raises as `snapshot`."""
        snapshot = self.snapshot(name)
        if not self.blob_path(snapshot.layer).exists():
            return {snapshot.layer}
        return {blob for blob in self.needs(snapshot) if not self.blob_path(blob).exists()}

    def import_snapshot(self, record: bytes, fetch: Callable[[str], bytes]) -> Snapshot:
        """Take over a snapshot of another store: each blob that is not here is fetched and checked, then the snapshot exists.

        Args:
            record: from the other store's `export`.
            fetch: gives the content of a blob by its name.

        Raises:
            StoreDamaged: the record or a blob is not what its hash says; nothing was published.
            StoreFull: it does not fit.
        """
        snapshot = parse_record(record, "a record that was sent here")
        with self.writing() as batch:
            self.fetch(snapshot.layer, batch, fetch)
            for blob in sorted(self.needs(snapshot)):
                self.fetch(blob, batch, fetch)
            batch.publish(snapshot)
        return snapshot

    def fetch(self, name: str, batch: Batch, fetch: Callable[[str], bytes]) -> None:
        """Have a blob, fetched and checked unless it is here. Raises StoreDamaged, StoreFull."""
        if self.blob_path(_blob_name(name)).exists():
            return
        data = fetch(name)
        if not is_named(name, data):
            raise StoreDamaged(f"snapshot store {self.root}: what was fetched as blob {name} has another hash")
        batch.put_named(name, data)

    def _blob_paths(self) -> Iterator[Path]:
        for folder in (self.root / "blobs").iterdir():
            yield from folder.iterdir()

    def verify(self) -> list[str]:
        """Read everything; one line for each snapshot or blob that is not whole. Empty = the store is sound."""
        found, checked = [], set()
        for name in self.snapshots():
            wrong, blobs = self._problems(name, checked)
            # Deleted and fetched again between two reads? Then it is not found twice.
            if wrong and self.snapshot_path(name).exists():
                wrong, blobs = self._problems(name, checked)
            # Another process may have deleted it meanwhile, and what it needed.
            if self.snapshot_path(name).exists():
                found += wrong
                checked |= blobs
        return found

    def _problems(self, name: str, checked: set[str]) -> tuple[list[str], set[str]]:
        """What is wrong with a snapshot, and the blobs that were found whole; those in `checked` are not read again."""
        found: list[str] = []
        whole: set[str] = set()
        try:
            needs = self.needs(self.snapshot(name))
        except SandboxError as error:
            return [f"{name}: {error}"], whole
        for blob in sorted(needs - checked):
            try:
                self.read(blob)
                whole.add(blob)
            except SandboxError as error:
                found.append(f"{name}: {error}")
        return found, whole


def _write_all(fd: int, parts: Sequence[bytes | memoryview]) -> None:
    """Write parts one behind the other with as few calls as may be."""
    for start in range(0, len(parts), MOST_PARTS):
        some = parts[start : start + MOST_PARTS]
        written = os.writev(fd, some) if len(some) > 1 else 0
        if written < sum(len(part) for part in some):  # The rest of it, or the error that stopped it.
            rest = memoryview(b"".join(some) if len(some) > 1 else some[0])[written:]
            while rest:
                rest = rest[os.write(fd, rest) :]


def is_named(name: str, data: bytes) -> bool:
    """Whether a blob with this content has this name."""
    if layer.digest(data) == name:
        return True
    from perilune.sandbox.pages import pack_name

    return pack_name(data) == name


def _blob_name(name: Any) -> str:
    if not isinstance(name, str) or len(name) != 64 or not set(name) <= set("0123456789abcdef"):
        raise ValueError(f"{name!r} is no blob's name")
    return name


def parse_record(record: bytes, what: str) -> Snapshot:
    """A snapshot's record. Raises StoreDamaged."""
    try:
        body, checksum, rest = record.split(b"\n")
        if rest or layer.digest(body) != checksum.decode():
            raise ValueError("its checksum does not fit")
        values = json.loads(body)
        if values.get("format") != FORMAT:
            raise ValueError(f"it has format {values.get('format')}, this version reads {FORMAT}")
        return Snapshot(**values)
    except (ValueError, TypeError) as error:
        raise StoreDamaged(f"{what} is damaged: {error}") from None


def _sync_folder(path: str | Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
