"""The memory of a running virtual machine, from outside: which pages are its own by now, reading them, writing them.

A machine's memory is a private map of its template's file. The kernel copies a page when it is first written, and says in
/proc/PID/pagemap which pages those are: exactly what a snapshot must hold. Where the map's writes are tracked (`qemu_memory.c`) it also
says which of them were written since it was last asked, and protects them again in the same step (PAGEMAP_SCAN, Linux 6.7).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perilune.sandbox.page_names import PAGE, Pages
from perilune.sandbox.pages import Numbers
from perilune.sandbox.protocol import GuestLost

_PRESENT, _SWAPPED, _OF_A_FILE = 1 << 63, 1 << 62, 1 << 61
_SCAN = 0xC0606610
_PROTECT, _CHECK_TRACKED = 1, 2
_IS_WRITTEN, _IS_OF_A_FILE, _IS_PRESENT, _IS_SWAPPED = 2, 4, 8, 16
_REGIONS = 4096
_MOST_PARTS = 1024
"""Regions of one call (IOV_MAX)."""
_libc = ctypes.CDLL(None, use_errno=True)
for _call in ("process_vm_readv", "process_vm_writev"):
    getattr(_libc, _call).restype = ctypes.c_ssize_t
    getattr(_libc, _call).argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]


KEPT_PAGES = 16384
"""Pages of room that a thread keeps for its next checkpoint: new memory costs as much to fill as reading does."""
_local = threading.local()


def _room(count: int) -> Pages:
    if count > KEPT_PAGES:
        return np.empty((count, PAGE), np.uint8)
    kept: Pages | None = getattr(_local, "room", None)
    if kept is None or len(kept) < count:
        kept = _local.room = np.empty((min(KEPT_PAGES, count + count // 2), PAGE), np.uint8)
    return kept[:count]


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a process has mapped its machine's memory.

    Attributes:
        pid: of the process.
        start, size: of the map, in bytes; page 0 of the guest is at `start`.
    """

    pid: int
    start: int
    size: int

    @staticmethod
    def find(pid: int, file: str, size: int) -> Memory:
        """The map of `file` in a process. Raises GuestLost if there is none."""
        info = os.stat(file)
        device = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}"
        try:
            with open(f"/proc/{pid}/maps") as maps:
                for line in maps:
                    span, _, _, where, inode = line.split()[:5]
                    if where == device and int(inode) == info.st_ino:
                        start, end = (int(number, 16) for number in span.split("-"))
                        if end - start == size:
                            return Memory(pid, start, size)
        except OSError as error:
            raise GuestLost(f"process {pid} has ended: {error}") from error
        raise GuestLost(f"process {pid} has no map of {size} bytes of {file}")

    def own_pages(self) -> Numbers:
        """Page numbers that are not the template's any more, sorted."""
        try:
            fd = os.open(f"/proc/{self.pid}/pagemap", os.O_RDONLY)
            try:
                data = os.pread(fd, self.size // PAGE * 8, self.start // PAGE * 8)
            finally:
                os.close(fd)
        except OSError as error:
            raise GuestLost(f"process {self.pid} has ended: {error}") from error
        entries = np.frombuffer(data, np.uint64)
        held = (entries & np.uint64(_PRESENT | _SWAPPED)) != 0
        return np.flatnonzero(held & ((entries & np.uint64(_OF_A_FILE)) == 0)).astype(np.uint32)

    def written(self) -> Numbers | None:
        """Own pages that were written since the last call (before the first: ever), sorted; None where the kernel does not track that.

        Raises:
            GuestLost: the process has ended.
        """
        regions: list[NDArray[np.uint64]] = []
        end, at, room = self.start + self.size, self.start, np.empty((_REGIONS, 3), np.uint64)
        try:
            fd = os.open(f"/proc/{self.pid}/pagemap", os.O_RDONLY)
            try:
                while at < end:
                    # There, written and not of a file: one that was only read counts as written too, and so does one that is not there.
                    arguments = bytearray(struct.pack(
                        "12Q", 96, _PROTECT | _CHECK_TRACKED, at, end, 0, room.ctypes.data, _REGIONS, 0, _IS_OF_A_FILE,
                        _IS_WRITTEN | _IS_OF_A_FILE, _IS_PRESENT | _IS_SWAPPED, _IS_WRITTEN,
                    ))  # fmt: skip
                    count = fcntl.ioctl(fd, _SCAN, arguments)
                    regions.append(room[:count, :2].copy())
                    at = max(at + PAGE, struct.unpack("12Q", arguments)[4])
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in (errno.ENOTTY, errno.EINVAL, errno.EPERM):
                return None
            raise GuestLost(f"process {self.pid} has ended: {error}") from error
        found = (np.concatenate(regions) - np.uint64(self.start)) // np.uint64(PAGE)
        length = (found[:, 1] - found[:, 0]).astype(np.int64)
        before = np.cumsum(length) - length
        return (np.repeat(found[:, 0].astype(np.int64) - before, length) + np.arange(length.sum())).astype(np.uint32)

    def read(self, number: Numbers) -> Pages:
        """[n, 4096] content of pages, until this thread reads again. Raises GuestLost."""
        pages = _room(len(number))
        self._move("process_vm_readv", number, pages)
        return pages

    def write(self, number: Numbers, pages: Pages) -> None:
        """Replace pages; the machine must not run. Raises GuestLost."""
        order = np.argsort(number, kind="stable")
        self._move("process_vm_writev", number[order], np.ascontiguousarray(pages[order]))

    def _move(self, call: str, number: Numbers, pages: Pages) -> None:
        if not len(number):
            return
        # Neighbours are one region.
        first = np.flatnonzero(np.diff(number.astype(np.int64), prepend=-2) != 1)
        regions: NDArray[np.uint64] = np.empty((len(first), 2), np.uint64)
        regions[:, 0] = number[first].astype(np.uint64) * PAGE + self.start
        regions[:, 1] = np.diff(first, append=len(number)) * PAGE
        done = 0
        for start in range(0, len(regions), _MOST_PARTS):
            some = np.ascontiguousarray(regions[start : start + _MOST_PARTS])
            count = int(some[:, 1].sum())
            here = np.array([pages.ctypes.data + done, count], np.uint64)
            moved = getattr(_libc, call)(self.pid, here.ctypes.data, 1, some.ctypes.data, len(some), 0)
            if moved != count:
                code = ctypes.get_errno() if moved < 0 else errno.EFAULT
                raise GuestLost(f"the memory of process {self.pid} cannot be reached: {os.strerror(code)}")
            done += count
