"""The host's memory as a tier: pages copied out of the pool, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

from perilune.serve.tiers.index import Prefix, TierIndex


class HostTier:
    """Prefixes in memory.

    Args:
        limit: most bytes.
        page_bytes: of a page of tokens.
        state_bytes: of the states of a prefix.
        spill: is given each prefix that has to leave, with its pages and states; None = it is lost.
    """

    def __init__(
        self,
        limit: int,
        page_bytes: int,
        state_bytes: int,
        spill: Callable[[Prefix, Mapping[bytes, Any], Sequence[Any]], None] | None = None,
    ) -> None:
        self.index = TierIndex(limit, page_bytes, state_bytes)
        self._pages: dict[bytes, Any] = {}
        self._states: dict[bytes, Sequence[Any]] = {}
        self._spill = spill

    def put(self, prefix: Prefix, pages: Mapping[bytes, Any], state: Sequence[Any]) -> None:
        """Take a prefix in.

        Args:
            prefix: what it is; nothing happens if it is here, or could never fit.
            pages: contents of those of its pages that are not here yet, as the pool gave them.
            state: contents of the pages of its states.
        """
        if prefix.digest in self.index or not self.index.fits(prefix):
            return
        self.index.add(prefix)
        self._pages |= pages
        self._states[prefix.digest] = state
        while (last := self.index.crowd(monotonic())) is not None:
            self._leave(last)

    def get(self, prefix: Prefix) -> tuple[list[Any], Sequence[Any]]:
        """Contents of a prefix that is here: its pages in order, those of its states."""
        return [self._pages[name] for name in prefix.pages], self._states[prefix.digest]

    def spill_all(self) -> None:
        """Give everything to the next tier, as before the end of the process."""
        for prefix in self.index:
            self._leave(prefix)

    def _leave(self, prefix: Prefix) -> None:
        state = self._states.pop(prefix.digest)
        if self._spill is not None:
            self._spill(prefix, {name: self._pages[name] for name in prefix.pages}, state)
        for name in self.index.drop(prefix.digest):
            del self._pages[name]
