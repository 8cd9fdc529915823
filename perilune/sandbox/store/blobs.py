"""Blobs named by their hash, in a folder with a limit that holds for all processes together.

    blobs/ab/cdef…       a blob
    tmp/                 files that are being written
    usage                bytes of all blobs
    lock                 shared while a snapshot is written, exclusive while blobs are collected

Nothing is changed in place. A killed writer leaves blobs that nothing names, or temporary files.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.errors import ConfigError
from perilune.sandbox.guest import layer
from perilune.sandbox.protocol import StoreDamaged, StoreFull

if TYPE_CHECKING:
    from perilune.sandbox.pages import Packs

SYNCS = ("none", "batch", "full")
"""none: the kernel writes when it likes (a power cut may cost the snapshot, and a reader will notice). batch: one flush of the file
system before a snapshot is published. full: every blob and folder is synced by itself."""
MOST_PARTS = 1024
"""Of one call (IOV_MAX)."""


class Blobs:
    """Several processes may use the folder at once.

    Args:
        root: made if missing, readable by its owner only.
        sync: one of `SYNCS`.
        max_bytes: most bytes of blobs; counts what is not collected yet, too.
    """

    def __init__(self, root: Path, *, sync: str = "batch", max_bytes: int = 64 << 30) -> None:
        if sync not in SYNCS:
            raise ConfigError(f"sync={sync!r} is not one of {', '.join(SYNCS)}")
        self.root, self.sync, self.max_bytes = root, sync, max_bytes
        for name in ("blobs", "tmp"):
            (root / name).mkdir(parents=True, exist_ok=True)
        os.chmod(root, 0o700)
        self._folders: set[str] = set()

    @functools.cached_property
    def packs(self) -> Packs:
        """Of memory pages, among these blobs."""
        from perilune.sandbox.pages import Packs  # With it comes NumPy, which files do without.

        return Packs.of(self.root / "blobs")

    def blob_path(self, name: str) -> Path:
        """Where a blob lies."""
        return self.root / "blobs" / name[:2] / name[2:]

    @contextlib.contextmanager
    def locked(self, kind: int, name: str = "lock") -> Iterator[int]:
        """Hold one of the folder's locks; yields its file's descriptor.

        Args:
            kind: fcntl.LOCK_SH or LOCK_EX.
        """
        fd = os.open(self.root / name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, kind)
            yield fd
        finally:
            os.close(fd)

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
        with self.locked(fcntl.LOCK_EX, "usage") as fd:
            used = int(os.pread(fd, 32, 0) or b"0")
            if count > 0 and used + count > self.max_bytes:
                raise StoreFull(
                    f"the snapshot store {self.root} holds {used} bytes and may hold {self.max_bytes}; "
                    f"{count} more do not fit. Remove snapshots (perilune sandbox rm), which frees what no other one uses"
                )
            os.pwrite(fd, b"%-31d" % max(0, used + count), 0)

    def used_bytes(self) -> int:
        """Bytes counted against the limit."""
        with self.locked(fcntl.LOCK_EX, "usage") as fd:
            return int(os.pread(fd, 32, 0) or b"0")

    def read(self, name: str) -> bytes:
        """A blob's content, checked. Raises StoreDamaged, naming the blob."""
        try:
            data = self.blob_path(blob_name(name)).read_bytes()
        except FileNotFoundError:
            raise StoreDamaged(f"snapshot store {self.root}: blob {name} is missing") from None
        except ValueError as error:
            raise StoreDamaged(f"snapshot store {self.root}: {error}") from None
        if not is_named(name, data):
            raise StoreDamaged(f"snapshot store {self.root}: blob {name} is corrupt: its content has another hash")
        return data

    def paths(self) -> Iterator[Path]:
        """Of all blobs."""
        for folder in (self.root / "blobs").iterdir():
            yield from folder.iterdir()


def is_named(name: str, data: bytes) -> bool:
    """Whether a blob with this content has this name."""
    if layer.digest(data) == name:
        return True
    from perilune.sandbox.pages import pack_name

    return pack_name(data) == name


def blob_name(name: Any) -> str:
    """The name. Raises ValueError for what cannot be one."""
    if not isinstance(name, str) or len(name) != 64 or not set(name) <= set("0123456789abcdef"):
        raise ValueError(f"{name!r} is no blob's name")
    return name


def _write_all(fd: int, parts: Sequence[bytes | memoryview]) -> None:
    """Write parts one behind the other with as few calls as may be."""
    for start in range(0, len(parts), MOST_PARTS):
        some = parts[start : start + MOST_PARTS]
        written = os.writev(fd, some) if len(some) > 1 else 0
        if written < sum(len(part) for part in some):  # The rest of it, or the error that stopped it.
            rest = memoryview(b"".join(some) if len(some) > 1 else some[0])[written:]
            while rest:
                rest = rest[os.write(fd, rest) :]


def sync_folder(path: str | Path) -> None:
    """Have the folder's entries on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
