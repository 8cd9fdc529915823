"""What a tier holds: prefixes with the states at their end, and the pages of tokens that several of them may share.

A prefix is there as a whole or not at all: its states are of no use without its tokens, nor the other way round. The least
recently used one goes first, unless a session has leased it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix in a tier.

    Attributes:
        digest: of its tokens.
        depth: how many tokens.
        pages: names of its pages of tokens, in order: digests of the tokens up to each page's end.
    """

    digest: bytes
    depth: int
    pages: tuple[bytes, ...]


class TierIndex:
    """Prefixes and the bytes that they take.

    Args:
        limit: most bytes.
        page_bytes: of a page of tokens.
        state_bytes: of the states of a prefix.
    """

    def __init__(self, limit: int, page_bytes: int, state_bytes: int) -> None:
        self.limit, self._page_bytes, self._state_bytes = limit, page_bytes, state_bytes
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()
        self._uses: Counter[bytes] = Counter()
        self._leases: dict[str, tuple[float, frozenset[bytes]]] = {}

    def __len__(self) -> int:
        return len(self._prefixes)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._prefixes

    def __iter__(self) -> Iterator[Prefix]:
        """Prefixes, the least recently used first."""
        return iter(list(self._prefixes.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all prefixes; a page that several share counts once."""
        return len(self._uses) * self._page_bytes + len(self._prefixes) * self._state_bytes

    def deepest(self, digests: Sequence[bytes], above: int, up_to: int) -> Prefix | None:
        """The prefix of most units among those a chain has, more than `above` and at most `up_to`; it counts as used."""
        for units in range(min(up_to, len(digests)), above, -1):
            found = self._prefixes.get(digests[units - 1])
            if found is not None:
                self._prefixes.move_to_end(found.digest)
                return found
        return None

    def has_page(self, name: bytes) -> bool:
        """Whether a page belongs to some prefix."""
        return name in self._uses

    def fits(self, prefix: Prefix) -> bool:
        """Whether there could be room for a prefix."""
        return len(prefix.pages) * self._page_bytes + self._state_bytes <= self.limit

    def add(self, prefix: Prefix) -> None:
        """Enter a prefix as the last used one; `crowd` tells what has to go for it."""
        assert prefix.digest not in self._prefixes, "the prefix is there already"
        self._prefixes[prefix.digest] = prefix
        self._uses.update(prefix.pages)

    def crowd(self, now: float) -> Prefix | None:
        """The prefix to drop next, if the bytes exceed the limit: the least recently used one without a lease, if any."""
        if self.nbytes <= self.limit:
            return None
        leased: set[bytes] = set().union(*(names for until, names in self._leases.values() if until > now))
        free = (prefix for prefix in self._prefixes.values() if prefix.digest not in leased)
        return next(free, None) or next(iter(self._prefixes.values()))

    def drop(self, digest: bytes) -> list[bytes]:
        """Take a prefix out; returns the names of pages that nobody uses any more."""
        prefix = self._prefixes.pop(digest)
        gone = []
        for name in prefix.pages:
            self._uses[name] -= 1
            if not self._uses[name]:
                del self._uses[name]
                gone.append(name)
        return gone

    def lease(self, session: str, digests: Sequence[bytes], until: float, now: float) -> None:
        """Keep a session's prefixes from being dropped before others; replaces its earlier lease."""
        self._leases = {name: lease for name, lease in self._leases.items() if lease[0] > now}
        self._leases[session] = until, frozenset(digests)
