"""Blobs of a snapshot that is being written."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from perilune.sandbox.guest import layer, linux
from perilune.sandbox.protocol import StoreFull
from perilune.sandbox.store.blobs import Blobs, sync_folder
from perilune.sandbox.store.record import Snapshot

AHEAD = 1 << 20
"""Bytes that a writer counts in advance; what it does not use it gives back, and what a killed one had is freed by `Store.collect`."""
SMALL = 512
"""Bytes of a file system block: what a blob is counted as at least."""


@dataclass(slots=True)
class Batch:
    """Blobs of a snapshot that is being written, from `Store.writing`."""

    store: Blobs
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
            sync_folder(path)

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
                sync_folder(folder)
        path = self.store.root / "snapshots" / f"{snapshot.id}.json"
        self.store.write_file(path, snapshot.to_bytes(), sync=self.store.sync != "none")
        if self.store.sync != "none":
            sync_folder(path.parent)
