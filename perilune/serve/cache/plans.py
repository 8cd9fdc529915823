"""What the cache asks an executor to do with the bytes. The cache itself moves none.

Operations of a chunk run in their order, before the chunk's forward pass, on the stream on which the forward runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class CopyPage:
    """Copy the first tokens of every attention layer's row into a fresh page: copy-on-write of a part-filled page."""

    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ZeroState:
    """Set the running state, matrices and windows of all recurrent layers, to zero; a fresh page holds somebody's bytes."""

    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RestoreState:
    """Copy a checkpoint, page by page, into the running state. The sources are never written.

    Attributes:
        sources: pages of the checkpoint, one for each cache group.
        targets: pages of the running state.
        depth: tokens whose states the checkpoint holds.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    depth: int


Operation = CopyPage | ZeroState | RestoreState


@dataclass(frozen=True, slots=True)
class ExportState:
    """Write the states of all recurrent layers after `position` tokens, fp32 accumulators included, into fresh pages.

    Attributes:
        position: tokens of the sequence; within the chunk, and a multiple of the hash unit.
        targets: one page for each cache group.
        reason: why the retention policy wants it, see `retention`.
    """

    position: int
    targets: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that now owns its pages.

    Attributes:
        request: its id.
        resume: prompt tokens that need not be computed, a multiple of the hash unit below the prompt's length.
        known: prompt tokens whose pages are cached, at least `resume`; what lies between has to be computed again
            because no checkpoint is that deep.
        pages: table of its token pages, which only ever grows at its end; entry i holds tokens i * page_tokens on.
        state: pages of its running state.
    """

    request: str
    resume: int
    known: int
    pages: Sequence[int]
    state: tuple[int, ...]


class Chunk(NamedTuple):  # made for each sequence in each step, and a tuple is made fastest
    """What a step does for one request: run `operations`, compute the tokens from `start` to `end`, write `exports`.

    Attributes:
        request: its id.
        step: the step it belongs to.
        start, end: positions of the first token and behind the last.
        pages: table of token pages, long enough for `end` tokens.
        state: pages of the running state.
        operations: to run before the forward pass; only a request's first chunk has any.
        exports: states to write during the forward pass, by position.
    """

    request: str
    step: int
    start: int
    end: int
    pages: Sequence[int]
    state: tuple[int, ...]
    operations: tuple[Operation, ...]
    exports: tuple[ExportState, ...]
