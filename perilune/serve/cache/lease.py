"""What a running request owns of the cache, and what a step under way has to settle when it has finished."""

from __future__ import annotations

from dataclasses import dataclass, field

from perilune.serve.cache.hashing import TokenChain
from perilune.serve.cache.plans import ExportState, Operation
from perilune.serve.cache.trie import Checkpoint, Node


@dataclass(slots=True, kw_only=True)
class Lease:
    """A request's pages and progress.

    Attributes:
        request: its id.
        chain: digests of its tokens; the engine appends what is generated.
        prompt: tokens of the prompt.
        turn_ends: tokens before the end of each message, ascending.
        junction: see `Match.junction`.
        resume: tokens that were cached.
        pages: table of token pages.
        held: all token pages it holds: those of the table, and those of its prefix that the table does not name because
            a deeper page of the same range holds their tokens too.
        state: pages of the running state.
        spare: pages for its next checkpoint, reserved at admission.
        sources: pages of the checkpoint it resumed from, held until the copy is done.
        operations: for its first chunk.
        scheduled: tokens that are computed once all its chunks are.
        last_step: the last step with a chunk of it; 0 = none yet.
        published: units of its chain that were entered into the tree, or found there.
        last_node: the node of the last of them.
        rolling: its last checkpoint that the next one supersedes, and where it is.
        publishing: False once a step of it failed, or everything was forgotten.
        broken: a step of it failed; its running state is unknown.
        released: nothing more is entered for it.
    """

    request: str
    chain: TokenChain
    prompt: int
    turn_ends: list[int]
    junction: int
    resume: int
    pages: list[int]
    held: set[int]
    state: tuple[int, ...]
    spare: tuple[int, ...]
    sources: tuple[int, ...]
    operations: tuple[Operation, ...]
    scheduled: int
    last_step: int = 0
    published: int = 0
    last_node: Node | None = None
    rolling: tuple[Node, Checkpoint] | None = None
    publishing: bool = True
    broken: bool = False
    released: bool = False


@dataclass(slots=True)
class ChunkRecord:
    """A chunk under way that has something to settle.

    Attributes:
        lease: of its request.
        start, end: tokens before and behind it.
        exports: states that it writes; their pages are held until it is settled.
        found: points that the policy wants and that had a checkpoint already, with the reason.
        first: whether it is the request's first.
    """

    lease: Lease
    start: int
    end: int
    exports: tuple[ExportState, ...]
    found: tuple[tuple[int, str], ...]
    first: bool


@dataclass(slots=True)
class Step:
    """A step under way.

    Attributes:
        number: counts from 1.
        records: its chunks, but for those in `plain`.
        plain: requests of chunks of one token that end no unit: when such a chunk has finished there is nothing to do.
        closing: requests that were released while this was the last step that used them.
    """

    number: int
    records: list[ChunkRecord] = field(default_factory=list)
    plain: list[Lease] = field(default_factory=list)
    closing: list[Lease] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A cached prefix that is not evicted before `HybridCache.unpin`; what a sender reads during a transfer.

    Attributes:
        node: its end; a request that begins with these tokens resumes at least there.
        table: the page of each range of tokens, the last one perhaps part-filled.
        state: pages of the checkpoint.
        held: all pages it holds.
    """

    node: Node
    table: tuple[int, ...]
    state: tuple[int, ...]
    held: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the prefix."""
        return self.node.depth
