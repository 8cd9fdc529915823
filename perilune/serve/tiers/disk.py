"""A folder as a tier: one file a page of tokens and one a prefix's states, each with a checksum, each written as a whole.

A file is written under another name, synced, and renamed, so a crash leaves whole files only; what is damaged all the same
fails its checksum, is removed, and counts as not there. A folder outlives the process: digests name the model, its weights
and the formats, so that another model finds nothing in it that it could take for its own. Files of other names are left
alone.

    line 1   "perilune tier 2"
    line 2   {"depth": …, "pages": [names]}     {} in files of pages
    line 3   sha256 of line 2 and of the rest
    rest     the bytes of the pages
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import time
from typing import IO, Any

from perilune.errors import ConfigError
from perilune.serve.tiers.index import Prefix, TierIndex

log = logging.getLogger(__name__)

MAGIC = b"perilune tier 2\n"
PAGE, STATE, PART, LOCK = ".tokens", ".state", ".part", "in-use"
_OURS = re.compile(r"([0-9a-f]{2})+\.(tokens|state)(\.part)?")
READERS = 16  # threads: reading is copying, and then twice as much work again for the checksum

Content = bytes | bytearray | memoryview


class DiskTier:
    """Prefixes in a folder; used by one process at a time, from any of its threads.

    Args:
        folder: made if it is not there. Prefixes that it holds are there again.
        limit: most bytes of all files, without their headers.
        page_bytes, state_bytes: as of `HostTier`.

    Attributes:
        damaged: files that failed their checksum.
        refused: prefixes that the disk had no room for, or would not write for another reason.

    Raises:
        ConfigError: the folder cannot be made or read, or another process uses it.
    """

    def __init__(self, folder: Path, limit: int, page_bytes: int, state_bytes: int) -> None:
        self.folder, self.damaged, self.refused = folder, 0, 0
        self._page_bytes, self._state_bytes = page_bytes, state_bytes
        self.index = TierIndex(limit, page_bytes, state_bytes)
        self._lock = threading.RLock()
        self._readers = ThreadPoolExecutor(min(READERS, os.cpu_count() or 1), "perilune-disk-reader")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._claim = _claimed(folder / LOCK)
            self._find()
        except OSError as error:
            raise ConfigError(f"the cache folder {folder} cannot be used: {error.strerror}") from None

    def _find(self) -> None:
        """Read what an earlier process left: whole prefixes are entered, everything else goes."""
        ours = [path for path in self.folder.iterdir() if _OURS.fullmatch(path.name)]
        for path in ours:
            if path.suffix == PART:
                _remove(path)
        pages = {bytes.fromhex(path.stem) for path in ours if path.suffix == PAGE}
        states = [path for path in ours if path.suffix == STATE]
        for path in sorted(states, key=lambda path: path.stat().st_mtime):
            prefix = _prefix(path)
            if prefix is None or not pages.issuperset(prefix.pages):
                _remove(path)
            else:
                self.index.add(prefix)
        for name in pages:
            if not self.index.has_page(name):
                _remove(self._path(name, PAGE))
        self._make_room()

    def put(self, prefix: Prefix, pages: Mapping[bytes, Content], state: Sequence[Content]) -> None:
        """Write a prefix; `pages` holds at least those that are not here. A disk without room drops it."""
        with self._lock:
            if prefix.digest in self.index or not self.index.fits(prefix):
                return
            try:
                for name in prefix.pages:
                    if not self.index.has_page(name):
                        self._write(name, PAGE, (pages[name],), {})
                about = {"depth": prefix.depth, "pages": [name.hex() for name in prefix.pages]}
                self._write(prefix.digest, STATE, state, about)
            except OSError as error:
                self._refuse(prefix, error)
                return
            self.index.add(prefix)
            self._make_room()

    def _refuse(self, prefix: Prefix, error: OSError) -> None:
        """Keep nothing of a prefix that could not be written: a full disk must not fill up with halves of prefixes."""
        if not self.refused:
            log.warning("the cache folder %s takes nothing more: %s", self.folder, error.strerror)
        self.refused += 1
        for name in prefix.pages:
            if not self.index.has_page(name):
                _remove(self._path(name, PAGE))

    def get(self, prefix: Prefix, pages: Sequence[Content], state: Sequence[Content]) -> bool:
        """Read a prefix.

        Args:
            prefix: what it is.
            pages: where to, for each of its pages; writable.
            state: where to, for the contents of its states, one behind the other.

        Returns:
            False: it is not here as it was written, and has been dropped.
        """
        with self._lock:
            if prefix.digest not in self.index:
                return False
            names = [(prefix.digest, STATE, state), *((name, PAGE, (page,)) for name, page in zip(prefix.pages, pages))]
            try:
                read = list(self._readers.map(self._read, *zip(*names)))
            except RuntimeError:  # the process ends, and its executors take no more work
                read = list(map(self._read, *zip(*names)))
            if not all(read):
                self.damaged += 1
                self._drop(prefix.digest)
                return False
            with contextlib.suppress(OSError):
                os.utime(self._path(prefix.digest, STATE))
            return True

    def deepest(self, digests, above: int, up_to: int) -> Prefix | None:
        """See `TierIndex.deepest`."""
        with self._lock:
            return self.index.deepest(digests, above, up_to)

    def lease(self, session: str, digests, seconds: float) -> None:
        """See `TierIndex.lease`."""
        with self._lock:
            self.index.lease(session, digests, time() + seconds, time())

    def close(self) -> None:
        """End its threads; another process may use the folder."""
        self._readers.shutdown()
        self._claim.close()

    def _make_room(self) -> None:
        while (last := self.index.crowd(time())) is not None:
            self._drop(last.digest)

    def _drop(self, digest: bytes) -> None:
        # The states go first: pages without them belong to nothing, states without pages would be half a prefix.
        _remove(self._path(digest, STATE))
        for name in self.index.drop(digest):
            _remove(self._path(name, PAGE))

    def _path(self, name: bytes, kind: str) -> Path:
        return self.folder / (name.hex() + kind)

    def _write(self, name: bytes, kind: str, contents: Iterable[Content], about: dict[str, Any]) -> None:
        path = self._path(name, kind)
        part = path.with_name(path.name + PART)
        header = json.dumps(about).encode() + b"\n"
        hasher = hashlib.sha256(header)
        for content in contents:
            hasher.update(content)
        try:
            with part.open("wb") as file:
                file.write(MAGIC + header + hasher.hexdigest().encode() + b"\n")
                for content in contents:
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError:
            _remove(part)
            raise

    def _read(self, name: bytes, kind: str, contents: Iterable[Content]) -> bool:
        """Whether a file is as it was written; what it holds is then in `contents`."""
        try:
            with self._path(name, kind).open("rb") as file:
                header, written = _head(file)
                hasher = hashlib.sha256(header)
                for content in contents:
                    if file.readinto(content) != len(content):
                        return False
                    hasher.update(content)
        except OSError:
            return False
        return hasher.hexdigest().encode() == written


def _head(file: IO[bytes]) -> tuple[bytes, bytes]:
    """The second and the third line of a file; both empty if it is none of this format."""
    if file.readline() != MAGIC:
        return b"", b""
    return file.readline(), file.readline().rstrip(b"\n")


def _prefix(path: Path) -> Prefix | None:
    """What a file of states says about itself, unchecked until it is read; None if it cannot be understood."""
    try:
        with path.open("rb") as file:
            header = json.loads(_head(file)[0])
        names = tuple(bytes.fromhex(name) for name in header["pages"])
        return Prefix(bytes.fromhex(path.stem), int(header["depth"]), names)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _remove(path: Path) -> None:
    """Remove a file, if it is there and the folder lets go of it; what stays is not entered, or fails its checksum."""
    with contextlib.suppress(OSError):
        path.unlink()


def _claimed(path: Path) -> IO[bytes]:
    """A file that is open, and locked, for as long as this process uses its folder.

    Raises:
        OSError: another process has locked it.
    """
    try:
        file = path.open("ab")
    except OSError:
        return open(os.devnull, "rb")  # a folder that nobody can write needs no lock
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise OSError(0, "another process uses it; wait for its end, or choose another folder") from None
    except OSError:  # a file system without locks
        pass
    return file
