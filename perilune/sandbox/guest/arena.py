"""Memory of a guest's process that a checkpoint need not read whole: files in /dev/shm/arena whose writer has its writes tracked.

A cooperating process (`session.py`) maps such a file at will, registers the map with userfaultfd for write tracking without faults
(UFFD_FEATURE_WP_ASYNC, Linux 6.7) and says so in `FOLDER/NAME.map`. A capture then asks the kernel by PAGEMAP_SCAN which pages were written
since the last one, and protects them again, in one step while the guest stands still. Where any of that is missing, the whole file is
read. Cooperating means to write the file through that map only: other writes are noticed (by its time) only while there are none
through it. Only what the writer itself says is believed, and only about its own file: a guest that lies spoils its own snapshots.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perilune.sandbox.guest.layer import CHUNK

FOLDER = "dev/shm/arena"
MOST = 16
"""Arenas of one guest that are tracked."""
PAGE = 4096
_SCAN = 0xC0606610
_PROTECT, _CHECK_TRACKED = 1, 2
_WRITTEN = 2
_REGIONS = 4096


@dataclass(slots=True)
class _Arena:
    """What was known of an arena at the last capture: who mapped it where, with which size, and its time of change."""

    key: tuple[int, ...]
    mtime_ns: int


class Tracker:
    """The arenas of one guest, seen by its agent.

    Args:
        proc: the guest's /proc, open.
        uppers, trees: upper folders and where they are mounted; that of dev/shm is the one that matters.

    Attributes:
        capture: number of the last capture.
    """

    def __init__(self, proc: int, uppers: Sequence[int], trees: Sequence[str]) -> None:
        self.proc = proc
        self.shared_memory = uppers[list(trees).index("dev/shm")]
        self.capture = 0
        self._arenas: dict[str, _Arena] = {}
        self._regions = ctypes.create_string_buffer(24 * _REGIONS)

    def changed(self, after: int | None) -> dict[str, set[int]]:
        """Begin a capture. Nothing of the guest may run.

        Args:
            after: number of the capture that the owner has; unless it is the last one, everything is new to it.

        Returns:
            Path of each tracked arena -> chunks that may differ from that capture. All others are to be read whole.
        """
        known = after is not None and after == self.capture
        self.capture += 1
        before, self._arenas, found = self._arenas, {}, {}
        for name in self._names():
            try:
                arena, written = self._look(name)
            except (OSError, ValueError, KeyError, TypeError, OverflowError):
                continue  # Not tracked, or not as it says.
            self._arenas[name] = arena
            last = before.get(name)
            # Its time changes with the first write to each protected page, too; without one, somebody wrote past the map.
            if known and last is not None and last.key == arena.key and (written or last.mtime_ns == arena.mtime_ns):
                found[f"{FOLDER}/{name}"] = written
        return found

    def _names(self) -> list[str]:
        with contextlib.suppress(OSError):
            fd = os.open("arena", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self.shared_memory)
            try:
                return sorted(name.removesuffix(".map") for name in os.listdir(fd) if name.endswith(".map"))[:MOST]
            finally:
                os.close(fd)
        return []

    def _look(self, name: str) -> tuple[_Arena, set[int]]:
        said = self._said(name)
        pid, start, size, serial = (int(said[key]) for key in ("pid", "start", "size", "serial"))
        fd = os.open(f"arena/{name}", os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self.shared_memory)
        try:
            info = os.fstat(fd)
        finally:
            os.close(fd)
        if (
            not 0 < pid < 1 << 22
            or info.st_size != size
            or start % PAGE
            or not self._maps(pid, start, size, info.st_ino)
        ):
            raise ValueError("the map is not as it says")
        written = self._written(pid, start, size)
        return _Arena((pid, start, size, serial, info.st_ino), info.st_mtime_ns), written

    def _said(self, name: str) -> dict[str, Any]:
        fd = os.open(f"arena/{name}.map", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self.shared_memory)
        try:
            return json.loads(os.read(fd, 4096))
        finally:
            os.close(fd)

    def _open(self, pid: int, name: str) -> int:
        return os.open(f"{pid}/{name}", os.O_RDONLY, dir_fd=self.proc)

    def _maps(self, pid: int, start: int, size: int, inode: int) -> bool:
        """Whether the process has just this file, from its beginning, shared and whole, at that place."""
        with open(self._open(pid, "maps"), "rb") as file:
            for line in file:
                fields = line.split(None, 5)
                if fields[0] == b"%x-%x" % (start, start + -(-size // PAGE) * PAGE):
                    return (
                        fields[1][1:2] == b"w"
                        and fields[1][3:4] == b"s"
                        and int(fields[2], 16) == 0
                        and int(fields[4]) == inode
                    )
        return False

    def _written(self, pid: int, start: int, size: int) -> set[int]:
        """Chunks with pages that were written since they were last protected; protects them again. Raises OSError if not tracked."""
        written: set[int] = set()
        end, at = start + -(-size // PAGE) * PAGE, start
        fd = self._open(pid, "pagemap")
        try:
            while at < end:
                arguments = bytearray(struct.pack(
                    "12Q", 96, _PROTECT | _CHECK_TRACKED, at, end, 0, ctypes.addressof(self._regions), _REGIONS, 0, 0, _WRITTEN, 0,
                    _WRITTEN,
                ))  # fmt: skip
                count = fcntl.ioctl(fd, _SCAN, arguments)
                for number in range(count):
                    first, last = struct.unpack_from("QQ", self._regions, 24 * number)
                    written.update(range((first - start) // CHUNK, -(-(last - start) // CHUNK)))
                reached = struct.unpack("12Q", arguments)[4]
                if reached <= at:
                    raise OSError(0, "the scan does not go on")
                at = reached
        finally:
            os.close(fd)
        return written
