"""Between the page pool and the tiers behind it: write back at eviction, prefetch when a request enters the queue.

Nothing is written while the pool has room (report §5.3.2). When it gives up the states of a prefix, these go to the host
together with the pages of its tokens, those that are there already excepted. A request that arrives is looked up in pool,
host and disk; what lies deeper in a tier than in the pool is brought back before the request is queued, and then it is a hit
like any other. So a tier never changes which tokens a hit may skip, only how many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from perilune.serve.cache import HybridCache, TokenChain
from perilune.serve.cache.admission import hit_pages
from perilune.serve.cache.trie import Node, ancestors
from perilune.serve.tiers.disk import DiskTier
from perilune.serve.tiers.host import HostTier
from perilune.serve.tiers.index import Prefix

Contents = tuple[Sequence[bytes], bytes]


class PageAccess(Protocol):
    """Bytes of the pool's pages."""

    def read_bytes(self, pages: Sequence[int]) -> list[bytes]:
        """Contents of pages."""
        ...

    def write_bytes(self, pages: Sequence[int], contents: Sequence[bytes]) -> None:
        """Put contents into pages."""
        ...


@dataclass(slots=True)
class TierCounts:
    """Counts since the tiers were made.

    Attributes:
        written_back: prefixes that went from the pool to the host.
        host_hits, disk_hits: prefixes that came back.
        tokens: tokens of these that were not in the pool.
        no_room: prefixes that could not come back because the pool was full.
    """

    written_back: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    tokens: int = 0
    no_room: int = 0


class Tiers:
    """Host and disk behind a cache. All methods are called on the engine's thread.

    Args:
        cache: whose evictions are written back.
        pages: its bytes.
        host_bytes: most bytes in the host's memory.
        disk: behind the host; None = nothing.
    """

    def __init__(self, cache: HybridCache, pages: PageAccess, host_bytes: int, disk: DiskTier | None = None) -> None:
        shape = cache.geometry
        self.counts = TierCounts()
        self._cache, self._pages, self._disk = cache, pages, disk
        self._files = ThreadPoolExecutor(1, "perilune-disk") if disk is not None else None
        spill = self._spill if disk is not None else None
        self._host = HostTier(host_bytes, shape.page_bytes, shape.groups * shape.page_bytes, spill)
        self._arrivals = 0
        cache.store.on_evict = self._write_back

    def _write_back(self, node: Node) -> None:
        """The states of a prefix are about to be evicted; its pages are still what they were."""
        checkpoint = node.checkpoint
        if checkpoint is None or node.digest in self._host.index:
            return
        size = self._cache.geometry.page_tokens
        digests = {one.depth: one.digest for one in ancestors(node)}
        ends = [*range(size, node.depth, size), node.depth]
        prefix = Prefix(node.digest, node.depth, tuple(digests[end] for end in ends))
        table = hit_pages(node, self._cache.geometry).table
        missing = [index for index, name in enumerate(prefix.pages) if not self._host.index.has_page(name)]
        contents = self._pages.read_bytes([table[index] for index in missing])
        state = b"".join(self._pages.read_bytes(checkpoint.pages))
        self._host.put(prefix, {prefix.pages[index]: content for index, content in zip(missing, contents)}, state)
        self.counts.written_back += 1

    def _spill(self, prefix: Prefix, pages, state: bytes) -> None:
        assert self._files is not None and self._disk is not None, "there is a disk to spill to"
        self._files.submit(self._disk.put, prefix, pages, state)

    def prefetch(self, chain: TokenChain, then: Callable[[], None], post: Callable[[Callable[[], None]], None]) -> None:
        """Bring back what a prompt could skip, then go on.

        Args:
            chain: of the prompt.
            then: called at once, or, if files have to be read first, later on the engine's thread.
            post: leaves a command for the engine's thread, from another one.
        """
        unit = self._cache.geometry.unit
        match = self._cache.match(chain)
        above, up_to = match.resume // unit, match.limit // unit
        near = self._host.index.deepest(chain.digests, above, up_to)
        far = None
        if self._disk is not None:
            far = self._disk.deepest(chain.digests, near.depth // unit if near else above, up_to)
        if far is None or self._files is None or self._disk is None:
            if near is not None and self._restore(chain, near, self._host.get(near)):
                self.counts.host_hits += 1
            then()
            return
        disk = self._disk

        def arrive(contents: Contents | None) -> None:
            if contents is not None and self._restore(chain, far, contents):
                self.counts.disk_hits += 1
            then()

        def read() -> None:
            contents = disk.get(far)
            post(lambda: arrive(contents))

        self._files.submit(read)

    def _restore(self, chain: TokenChain, prefix: Prefix, contents: Contents) -> bool:
        """Put a prefix into the pool, as an engine would that was sent it."""
        shape = self._cache.geometry
        resume = self._cache.match(chain).resume
        if resume >= prefix.depth:  # somebody else computed it meanwhile
            return False
        self._arrivals += 1
        incoming = self._cache.receive(f"tier {self._arrivals}", chain, prefix.depth)
        if incoming is None:
            self.counts.no_room += 1
            return False
        pages, state = contents
        first = incoming.start // shape.page_tokens
        self._pages.write_bytes(incoming.pages, pages[first : first + len(incoming.pages)])
        size = shape.page_bytes
        self._pages.write_bytes(incoming.state, [state[at : at + size] for at in range(0, len(state), size)])
        for part in sorted(incoming.parts):
            self._cache.arrived(incoming.name, part)
        self.counts.tokens += prefix.depth - resume
        return True

    def lease(self, session: str, chain: TokenChain, seconds: float) -> None:
        """Keep the prefixes of a session's conversation longer than others."""
        now = monotonic()
        self._host.index.lease(session, chain.digests, now + seconds, now)
        if self._disk is not None:
            self._disk.lease(session, chain.digests, seconds)

    def metrics(self) -> dict[str, int]:
        """Counts, and what is held now."""
        counts = self.counts
        held = {"host_bytes": self._host.index.nbytes, "host_prefixes": len(self._host.index)}
        if self._disk is not None:
            held |= {"disk_bytes": self._disk.index.nbytes, "disk_prefixes": len(self._disk.index)}
            held |= {"disk_damaged_total": self._disk.damaged, "disk_refused_total": self._disk.refused}
        return held | {
            "written_back_total": counts.written_back, "host_hits_total": counts.host_hits,
            "disk_hits_total": counts.disk_hits, "tokens_brought_back_total": counts.tokens,
            "no_room_total": counts.no_room,
        }  # fmt: skip

    def close(self) -> None:
        """Write everything to disk, if there is one, and end; the next process finds it."""
        self._cache.store.on_evict = None
        if self._files is not None:
            for node in list(self._cache.store.checkpoints.values()):
                self._write_back(node)
            self._host.spill_all()
            self._files.shutdown(wait=True)
