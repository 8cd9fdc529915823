"""The snapshot store: blobs, and snapshots that name the blobs they need.

    blobs/ab/cdef…       pieces of files (64 KiB; a piece of zeros is not stored), packs of memory pages (`pages.py`), and layers: JSON
                         lists of entries of files, or a JSON object of a machine whose "needs" are all blobs that it is made of
    snapshots/ID.json    written last; a snapshot exists once its file does. Its last line is the hash of the rest.

The other files are those of `blobs.py`. `collect` removes what killed writers left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from perilune.errors import SandboxError
from perilune.sandbox.guest import layer
from perilune.sandbox.protocol import NoSuchSandbox, StoreDamaged
from perilune.sandbox.store.batch import SMALL, Batch
from perilune.sandbox.store.blobs import Blobs, blob_name, is_named
from perilune.sandbox.store.record import Snapshot, check_name, parse_record


class Store(Blobs):
    """A folder with blobs and snapshots; several processes may use it at once. Arguments as `Blobs`."""

    def __init__(self, root: Path, *, sync: str = "batch", max_bytes: int = 64 << 30) -> None:
        super().__init__(root, sync=sync, max_bytes=max_bytes)
        (root / "snapshots").mkdir(exist_ok=True)

    def snapshot_path(self, name: str) -> Path:
        """Where a snapshot's record lies. Raises SandboxError for a name that no snapshot can have."""
        return self.root / "snapshots" / f"{check_name(name)}.json"

    def new_id(self) -> str:
        """A fresh snapshot name."""
        return f"snap-{secrets.token_hex(8)}"

    @contextlib.contextmanager
    def writing(self) -> Iterator[Batch]:
        """Write blobs and publish; keeps collection away meanwhile."""
        with self.locked(fcntl.LOCK_SH):
            batch = Batch(self)
            try:
                yield batch
            finally:
                if batch.credit:
                    self.reserve(-batch.credit)

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
                blob_name(blob)
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
        with self.locked(fcntl.LOCK_EX):
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
        with self.locked(fcntl.LOCK_EX):
            needed, freed, kept = self.references(), 0, 0
            for path in self.paths():
                size = path.stat().st_size
                if needed[path.parent.name + path.name] == 0:
                    path.unlink()
                    freed += size
                else:
                    kept += max(size, SMALL)
            for path in (self.root / "tmp").iterdir():
                path.unlink(missing_ok=True)  # Writers hold the shared lock, so none is at work.
            with self.locked(fcntl.LOCK_EX, "usage") as fd:
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
        if self.blob_path(blob_name(name)).exists():
            return
        data = fetch(name)
        if not is_named(name, data):
            raise StoreDamaged(f"snapshot store {self.root}: what was fetched as blob {name} has another hash")
        batch.put_named(name, data)

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
