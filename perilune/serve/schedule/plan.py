"""A step as data: which rows compute which tokens, with the operations and exports that the cache wants around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from perilune.serve.cache import Chunk
from perilune.serve.schedule.sequence import Sequence


class Row(NamedTuple):
    """A row of a step.

    Attributes:
        sequence: whose tokens.
        chunk: which tokens, where their pages are, what to do before (copies, zeros) and what to write (exports).
        draws: whether the chunk ends with the sequence's last token, so that the next one is drawn.
        awaits: whether its one token is being drawn by the step before, and known to the device only.
    """

    sequence: Sequence
    chunk: Chunk
    draws: bool
    awaits: bool = False

    @property
    def tokens(self) -> list[int]:
        """The tokens to compute; none if it is awaited."""
        return self.sequence.ids[self.chunk.start : self.chunk.end]


@dataclass(frozen=True, slots=True)
class Plan:
    """A step.

    Attributes:
        step: its number in the cache.
        decode: rows of one token each, to be run together.
        prefill: rows of several tokens, or of a prompt's last one.
        late: how many of these, at the end, are pieces of long prompts that others need not wait for.
    """

    step: int
    decode: tuple[Row, ...]
    prefill: tuple[Row, ...]
    late: int = 0

    @property
    def stages(self) -> tuple[tuple[Row, ...], ...]:
        """Rows of prompts in the order in which they run; what the first stage draws need not wait for the second."""
        first = len(self.prefill) - self.late
        if self.late and (self.decode or any(row.draws for row in self.prefill[:first])):
            return self.prefill[:first], self.prefill[first:]
        return (self.prefill,)

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows."""
        return self.decode + self.prefill

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decode) + sum(row.chunk.end - row.chunk.start for row in self.prefill)
