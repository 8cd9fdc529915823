"""A folder as a tier: one file a page of tokens and one a prefix's states, each with a checksum, each written as a whole.

A file is written under another name, synced, and renamed, so a crash leaves whole files only; what is damaged all the same
fails its checksum, is removed, and counts as not there. A folder outlives the process: digests name the model, its weights
and the formats, so that another model finds nothing in it that it could take for its own.

    line 1   "perilune tier 1"
    line 2   {"sha256": of the rest, "depth": …, "pages": [names]}     the last two in files of states only
    rest     the bytes of the pages
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import time
from typing import IO, Any

from perilune.errors import ConfigError
from perilune.serve.tiers.index import Prefix, TierIndex

log = logging.getLogger(__name__)

MAGIC = b"perilune tier 1\n"
PAGE, STATE, PART = ".tokens", ".state", ".part"
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
        ConfigError: the folder cannot be made or read.
    """

    def __init__(self, folder: Path, limit: int, page_bytes: int, state_bytes: int) -> None:
        self.folder, self.damaged, self.refused = folder, 0, 0
        self._page_bytes, self._state_bytes = page_bytes, state_bytes
        self.index = TierIndex(limit, page_bytes, state_bytes)
        self._lock = threading.RLock()
        self._readers = ThreadPoolExecutor(min(READERS, os.cpu_count() or 1), "perilune-disk-reader")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._find()
        except OSError as error:
            raise ConfigError(f"the cache folder {folder} cannot be used: {error.strerror}") from None

    def _find(self) -> None:
        """Read what an earlier process left: whole prefixes are entered, everything else goes."""
        for part in self.folder.glob(f"*{PART}"):
            part.unlink(missing_ok=True)
        pages = {bytes.fromhex(path.stem) for path in self.folder.glob(f"*{PAGE}")}
        states = sorted(self.folder.glob(f"*{STATE}"), key=lambda path: path.stat().st_mtime)
        for path in states:
            with path.open("rb") as file:
                header = _header(file)
            names = tuple(bytes.fromhex(name) for name in header["pages"]) if header else ()
            if header is None or not pages.issuperset(names):
                path.unlink(missing_ok=True)
                continue
            self.index.add(Prefix(bytes.fromhex(path.stem), header["depth"], names))
        for name in pages:
            if not self.index.has_page(name):
                self._path(name, PAGE).unlink(missing_ok=True)
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
                self._path(name, PAGE).unlink(missing_ok=True)

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
            if not all(list(self._readers.map(self._read, *zip(*names)))):
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
        """End its threads."""
        self._readers.shutdown()

    def _make_room(self) -> None:
        while (last := self.index.crowd(time())) is not None:
            self._drop(last.digest)

    def _drop(self, digest: bytes) -> None:
        # The states go first: pages without them belong to nothing, states without pages would be half a prefix.
        self._path(digest, STATE).unlink(missing_ok=True)
        for name in self.index.drop(digest):
            self._path(name, PAGE).unlink(missing_ok=True)

    def _path(self, name: bytes, kind: str) -> Path:
        return self.folder / (name.hex() + kind)

    def _write(self, name: bytes, kind: str, contents: Iterable[Content], about: dict[str, Any]) -> None:
        path = self._path(name, kind)
        part = path.with_name(path.name + PART)
        hasher = hashlib.sha256()
        for content in contents:
            hasher.update(content)
        header = json.dumps({"sha256": hasher.hexdigest()} | about)
        try:
            with part.open("wb") as file:
                file.write(MAGIC + header.encode() + b"\n")
                for content in contents:
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def _read(self, name: bytes, kind: str, contents: Iterable[Content]) -> bool:
        """Whether a file is as it was written; what it holds is then in `contents`."""
        hasher = hashlib.sha256()
        try:
            with self._path(name, kind).open("rb") as file:
                header = _header(file)
                for content in contents:
                    if file.readinto(content) != len(content):
                        return False
                    hasher.update(content)
        except OSError:
            return False
        return header is not None and hasher.hexdigest() == header["sha256"]


def _header(file: IO[bytes]) -> dict[str, Any] | None:
    """The second line of a file, or None if the file is none of ours."""
    try:
        if file.readline() != MAGIC:
            return None
        header = json.loads(file.readline())
    except (OSError, ValueError):
        return None
    return header if isinstance(header, dict) and "sha256" in header else None
