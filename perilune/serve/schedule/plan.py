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
        draws: whether the chunk ends with the last known token, so that the next one is drawn.
    """

    sequence: Sequence
    chunk: Chunk
    draws: bool

    @property
    def tokens(self) -> list[int]:
        """The tokens to compute."""
        return self.sequence.ids[self.chunk.start : self.chunk.end]


@dataclass(frozen=True, slots=True)
class Plan:
    """A step.

    Attributes:
        step: its number in the cache.
        decode: rows of one token each, to be run together.
        prefill: rows of several tokens, or of a prompt's last one.
    """

    step: int
    decode: tuple[Row, ...]
    prefill: tuple[Row, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows."""
        return self.decode + self.prefill

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decode) + sum(row.chunk.end - row.chunk.start for row in self.prefill)
