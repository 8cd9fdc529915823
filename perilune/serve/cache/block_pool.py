"""Who uses which page of the pool: free pages, holders, and what of the rest could be evicted.

A page is used for two reasons that are counted apart. *Holders* may touch its bytes: running requests, operations under
way, pins. *Bindings* make it part of the cache: the prefixes whose tokens it holds, or the checkpoint it belongs to. A
page without either is free at once. A page that is bound but has no holder can be evicted.

Fences need no list of their own: whoever may still touch a page in a step under way remains its holder until that step
has finished.
"""

from __future__ import annotations

from perilune.errors import ConfigError

FREE, TOKENS, STATE = 0, 1, 2
HELD, BOUND = 4, 8


class BlockPool:
    """Pages 0 to `pages` - 1 of equal bytes, for cached tokens and for states alike.

    Args:
        pages: how many.

    Attributes:
        pages: how many.
        evictable: pages that are bound and have no holder.

    Raises:
        ConfigError: no page at all.
    """

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ConfigError(f"a cache of {pages} pages; at least 1 is needed, give it more memory")
        self.pages = pages
        self.evictable = 0
        self._free = list(range(pages - 1, -1, -1))
        self._holders = [0] * pages
        self._bindings = [0] * pages
        self._marks = bytearray(pages)  # kind, plus HELD, plus BOUND: counting them is one call

    @property
    def free(self) -> int:
        """Pages that nobody uses."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that are free or can be made free by evicting."""
        return len(self._free) + self.evictable

    def take(self, count: int, kind: int) -> list[int]:
        """Free pages, now held once by the caller; their bytes are whatever the last user left."""
        assert count <= len(self._free), f"{count} pages taken of {len(self._free)} free ones"
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
            self._marks[page] = kind | HELD
        return taken

    def hold(self, page: int) -> None:
        """One more holder of a page in use."""
        mark = self._marks[page]
        assert mark != FREE, f"page {page} is free and cannot be held"
        self._holders[page] += 1
        if not mark & HELD:
            self._marks[page] = mark | HELD
            self.evictable -= 1

    def drop(self, page: int) -> None:
        """One holder less; without holders and bindings the page is free."""
        left = self._holders[page] - 1
        assert left >= 0, f"page {page} has no holder to drop"
        self._holders[page] = left
        if not left:
            self._marks[page] &= ~HELD
            if self._bindings[page]:
                self.evictable += 1
            else:
                self._release(page)

    def bind(self, page: int) -> None:
        """Make a held page part of the cache, once for each prefix or checkpoint that it serves."""
        mark = self._marks[page]
        assert mark & HELD, f"page {page} is bound by somebody who does not hold it"
        self._bindings[page] += 1
        self._marks[page] = mark | BOUND

    def unbind(self, page: int) -> None:
        """Undo one `bind`."""
        left = self._bindings[page] - 1
        assert left >= 0, f"page {page} is not bound"
        self._bindings[page] = left
        if not left:
            self._marks[page] &= ~BOUND
            if not self._holders[page]:
                self.evictable -= 1
                self._release(page)

    def _release(self, page: int) -> None:
        self._marks[page] = FREE
        self._free.append(page)

    def is_evictable(self, page: int) -> bool:
        """Whether the page is part of the cache and nobody may touch it."""
        return self._marks[page] & (HELD | BOUND) == BOUND

    def holders(self, page: int) -> int:
        """Holders of a page."""
        return self._holders[page]

    def bindings(self, page: int) -> int:
        """Prefixes, or checkpoints, that a page serves."""
        return self._bindings[page]

    def kind(self, page: int) -> int:
        """FREE, TOKENS or STATE."""
        return self._marks[page] & 3

    def mark(self, page: int) -> int:
        """Kind of a page, plus HELD, plus BOUND."""
        return self._marks[page]

    def count(self, kind: int, *, bound: bool) -> int:
        """Used pages of a kind, either those in the cache or those that only running requests use."""
        mark = kind | (BOUND if bound else 0)
        return self._marks.count(mark | HELD) + (self._marks.count(mark) if bound else 0)
