"""A machine's memory that is filled as it is touched: its processor waits for a page that is not here yet, and runs on once it is.

The monitor's map is registered for faults of missing pages (`qemu_memory.c`). A fault brings in all pages of the pack that the touched one
lies in; a thread brings in the other packs behind that, so that the machine depends on where they come from for as short as possible.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import struct
import threading
from collections.abc import Callable, Iterator

import numpy as np

from perilune.errors import SandboxError
from perilune.sandbox.drivers.memory import Memory
from perilune.sandbox.page_names import PAGE, Pages
from perilune.sandbox.pages import ZERO, Numbers, Packs, Table
from perilune.sandbox.protocol import GuestLost

PLACE = 1000
"""Number of the descriptor in the monitor, as in `qemu_memory.c`."""
_PIDFD_GETFD = 438
_COPY, _ZEROS = 0xC028AA03, 0xC020AA04
_PROTECTED = 2
_MESSAGE = struct.Struct("<B7xQQ8x")
_FAULT = 0x12
ZEROS_AT_ONCE = 512
"""Pages without content that one fault brings in at most."""


def descriptor(pidfd: int) -> int:
    """The monitor's userfaultfd. Raises OSError where there is none or it may not be had."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(_PIDFD_GETFD, pidfd, PLACE, 0)
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return fd


class LazyMemory:
    """Fills one machine's memory; it ends with `close`.

    Args:
        memory: where the monitor has it.
        faults: from `descriptor`; closed with this.
        table: all pages that are not zeros.
        packs: of the store that they are in or will be in.
        have: returns once a pack is in that store. Raises SandboxError if nobody has it.
        lose: ends the machine, whose memory cannot be filled.

    Attributes:
        faulted: pages that were waited for.
    """

    def __init__(
        self, memory: Memory, faults: int, table: Table, packs: Packs, have: Callable[[str], None], lose: Callable[[], None]
    ) -> None:  # fmt: skip
        self.memory, self.table, self.packs = memory, table, packs
        self._faults, self._have, self._lose = faults, have, lose
        self.faulted = 0
        self._filled: set[int] = set()
        self._lock = threading.Lock()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._failure: SandboxError | None = None
        self._threads = [
            threading.Thread(target=work, name=f"{name} of {memory.pid}", daemon=True)
            for name, work in (("faults", self._answer), ("memory", self._fill))
        ]  # fmt: skip
        self._running = len(self._threads)
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Return once all of it is there. Raises SandboxError if that will not be."""
        self._threads[1].join()
        if self._failure is not None:
            raise self._failure

    @property
    def failure(self) -> str:
        """Why the memory could not be filled, or ""."""
        return "" if self._failure is None else str(self._failure)

    def close(self) -> None:
        """Stop filling; the machine has ended. What waits for another store does so no longer than that takes."""
        with self._lock:
            if self._running:
                os.eventfd_write(self._stop, 1)

    def _answer(self) -> None:
        poll = select.poll()
        for fd in (self._faults, self._stop):
            poll.register(fd, select.POLLIN)
        with self._failing():
            while True:
                if any(fd == self._stop for fd, _ in poll.poll()):
                    return
                with contextlib.suppress(BlockingIOError):
                    kind, _, address = _MESSAGE.unpack(os.read(self._faults, 32))
                    if kind == _FAULT:
                        self.faulted += 1
                        self._bring((address - self.memory.start) // PAGE)

    def _fill(self) -> None:
        with self._failing():
            for number in range(len(self.table.packs)):
                if select.select([self._stop], [], [], 0)[0]:
                    return
                self._bring_pack(number)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Around a thread's work: a failure ends the machine; the last thread closes the descriptors."""
        try:
            yield
        except Exception as error:  # Whatever it is, its machine would wait for good.
            # The machine's end, from outside, is no failure of this.
            if not select.select([self._stop], [], [], 0)[0]:
                self._failure = (
                    error if isinstance(error, SandboxError) else GuestLost(f"its memory cannot be filled: {error}")
                )
                self._lose()
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    for fd in (self._faults, self._stop):
                        os.close(fd)

    def _bring(self, page: int) -> None:
        """Bring in what a page is part of."""
        numbers = self.table.number
        row = int(np.searchsorted(numbers, page))
        if row < len(numbers) and numbers[row] == page and self.table.pack[row] != ZERO:
            self._bring_pack(int(self.table.pack[row]))
            return
        held = numbers[self.table.pack != ZERO]
        after = int(np.searchsorted(held, page))
        end = int(held[after]) if after < len(held) else self.memory.size // PAGE
        count = min(end - page, ZEROS_AT_ONCE)
        start, length = self.memory.start + page * PAGE, count * PAGE
        done = self._ioctl(_ZEROS, struct.pack("<QQQq", start, length, 0, 0), 24)
        if done < length:  # Some of it is there already: at least the one that is waited for.
            self._ioctl(_ZEROS, struct.pack("<QQQq", start, PAGE, 0, 0), 24)

    def _bring_pack(self, number: int) -> None:
        name = self.table.packs[number]
        self._have(name)
        with self._lock:
            if number in self._filled:
                return
            rows = self.table.pack == number
            part = Table(self.table.number[rows], np.zeros(rows.sum(), np.uint32), self.table.place[rows], (name,))
            for numbers, pages in self.packs.pieces(part):
                self._copy(numbers, pages)
            self._filled.add(number)

    def _copy(self, numbers: Numbers, pages: Pages) -> None:
        """Put pages there that are not; neighbours in one call."""
        first = np.flatnonzero(np.diff(numbers.astype(np.int64), prepend=-2) != 1)
        for begin, end in zip(first.tolist(), [*first[1:].tolist(), len(numbers)]):
            at = begin
            while at < end:
                target, source = self.memory.start + int(numbers[at]) * PAGE, pages.ctypes.data + at * PAGE
                done = self._ioctl(_COPY, struct.pack("<QQQQq", target, source, (end - at) * PAGE, _PROTECTED, 0), 32)
                at += done // PAGE or 1  # One that was there, written before its content: it stays.

    def _ioctl(self, call: int, arguments: bytes, result: int) -> int:
        """Bytes that a call put there; 0 if its first page was there. Raises OSError."""
        packed = bytearray(arguments)
        while True:
            try:
                fcntl.ioctl(self._faults, call, packed)
            except OSError as error:
                if error.errno != errno.EEXIST and error.errno != errno.EAGAIN:
                    raise
                done = struct.unpack_from("<q", packed, result)[0]
                if error.errno == errno.EAGAIN and done <= 0:
                    continue  # The machine's map is being changed at this moment.
                return max(0, done)
            return struct.unpack_from("<q", packed, result)[0]
