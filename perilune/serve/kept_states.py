"""States kept between requests, found again by the tokens that led to them.

A KDA memory holds its whole past in one matrix and cannot be cut back, so a kept state serves a prompt only if *all* of
its tokens begin that prompt. States are therefore kept at the two places where prompts fork or grow: at the end of a
prompt, and at the end of a chat turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from perilune.serve.generator import Prefix


class KeptStates:
    """The most recently used states, limited in number and bytes.

    Args:
        limit: most states kept; 0 keeps none.
        max_bytes: most bytes of all kept states together.
    """

    def __init__(self, limit: int = 16, max_bytes: int = 2**28) -> None:
        self.limit = limit
        self.max_bytes = max_bytes
        self._entries: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self._bytes: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all kept states."""
        return sum(self._bytes.values())

    def find(self, ids: Sequence[int]) -> Prefix | None:
        """The longest kept prefix of `ids`, now the most recently used; the caller must copy it before running on."""
        ids = tuple(ids)
        best = max((key for key in self._entries if ids[: len(key)] == key), key=len, default=None)
        if best is None:
            return None
        self._entries.move_to_end(best)
        return self._entries[best]

    def keep(self, prefix: Prefix) -> None:
        """Keep a state that nobody else will advance; the least recently used ones make room."""
        key = tuple(prefix.ids)
        size = prefix.state.nbytes() + prefix.logits_1Z.nbytes
        if self.limit == 0 or size > self.max_bytes:
            return
        self._entries[key] = prefix
        self._entries.move_to_end(key)
        self._bytes[key] = size
        while len(self._entries) > self.limit or self.nbytes > self.max_bytes:
            oldest, _ = self._entries.popitem(last=False)
            del self._bytes[oldest]

    def clear(self) -> None:
        """Forget everything, for example after the weights changed."""
        self._entries.clear()
        self._bytes.clear()
