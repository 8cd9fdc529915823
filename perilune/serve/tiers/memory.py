"""Memory of the host that pages are copied to and from: equal places in a few large blocks.

For a GPU the blocks are pinned: the device then reads and writes them itself, at the speed of its bus and beside everything
else. Pinning costs 0.4 seconds for a GB, so blocks grow with what is kept, and are kept. A place is free again when
nobody refers to its page any more, be it a tier, a file that is being written or a copy under way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from perilune.errors import CapacityError

FIRST_BLOCK, LARGEST_BLOCK = 2**24, 2**28  # bytes


class HostPage:
    """The bytes of a page.

    Args:
        memory: whose place it takes.
        block, place: number of the block, and of the place in it.

    Attributes:
        ready: behind the device's latest copy to it; None = there is none.
    """

    __slots__ = ("_memory", "block", "place", "ready")

    def __init__(self, memory: HostMemory, block: int, place: int) -> None:
        self._memory, self.block, self.place = memory, block, place
        self.ready: torch.cuda.Event | None = None

    def __del__(self) -> None:
        self._memory.give_back(self.block, self.place, self.ready)

    def buffer(self) -> memoryview:
        """Its bytes, to be read or written, once they are there."""
        if self.ready is not None:
            self.ready.synchronize()
        return memoryview(self._memory.blocks[self.block][self.place].numpy())


class HostMemory:
    """Places for pages.

    Args:
        size: bytes of a page.
        pinned: whether a GPU copies from and to it.

    Attributes:
        blocks: uint8 `[places, size]` each.
    """

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.size, self._pinned = size, pinned
        self.blocks: list[Tensor] = []
        self._free: list[tuple[int, int, torch.cuda.Event | None]] = []
        self._lock = threading.RLock()  # a garbage collection within it may give pages back

    def take(self, count: int) -> list[HostPage]:
        """So many pages, of any contents.

        Raises:
            CapacityError: the host has no more memory, or none that a GPU may read.
        """
        with self._lock:
            while len(self._free) < count:
                self._grow()
            taken = [self._free.pop() for _ in range(count)]
        found = []
        for block, place, ready in taken:
            page = HostPage(self, block, place)
            page.ready = ready
            found.append(page)
        return found

    def reserve(self, count: int) -> None:
        """Make sure that so many pages are there without growing, those that are taken included. CapacityError as in `take`."""
        with self._lock:
            while sum(map(len, self.blocks)) < count:
                self._grow()

    def give_back(self, block: int, place: int, ready: torch.cuda.Event | None) -> None:
        """Of a page that is gone; a copy to its place may still be under way."""
        self._free.append(
            (block, place, ready)
        )  # one operation for the interpreter: no lock, which a finalizer must not wait for

    def _grow(self) -> None:
        """Another block, twice as large as the last one."""
        before = self.blocks[-1].numel() if self.blocks else 0
        places = max(1, min(LARGEST_BLOCK, max(FIRST_BLOCK, 2 * before)) // self.size)
        try:
            self.blocks.append(torch.empty(places, self.size, dtype=torch.uint8, pin_memory=self._pinned))
        except RuntimeError as error:
            raise CapacityError(
                f"the host has no room for {places * self.size} more bytes of pages that the pool gave up, after "
                f"{sum(block.numel() for block in self.blocks)}; give them less memory ({error})"
            ) from None
        number = len(self.blocks) - 1
        # The last one is taken first: neighbours are taken one after the other, and copied together.
        self._free[:0] = [(number, place, None) for place in reversed(range(places))]


def runs(pages: Sequence[int], places: Sequence[HostPage]) -> Iterator[tuple[int, int, int, int]]:
    """Pages of a pool and of the host that lie one behind the other in both, as (first page, block, first place, how many)."""
    first = 0
    for index in range(1, len(pages) + 1):
        whole = index == len(pages)
        here, before = (None, None) if whole else (places[index], places[index - 1])
        if whole or (pages[index], here.block, here.place) != (pages[index - 1] + 1, before.block, before.place + 1):
            yield pages[first], places[first].block, places[first].place, index - first
            first = index
