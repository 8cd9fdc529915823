"""Between the page pool and the tiers behind it: write back at eviction, prefetch when a request enters the queue.

Nothing is written while the pool has room (report §5.3.2). When it gives up the states of a prefix, these go to the host
together with the pages of its tokens, those that are there already excepted. A request that arrives is looked up in pool,
host and disk; what lies deeper in a tier than in the pool is brought back before the request is queued, and then it is a hit
like any other. So a tier never changes which tokens a hit may skip, only how many. While files are read, or a GPU fetches
pages beside what it computes, other requests go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Protocol

from perilune.errors import CapacityError
from perilune.serve.cache import HybridCache, TokenChain
from perilune.serve.cache.admission import hit_pages
from perilune.serve.cache.receive import Incoming
from perilune.serve.cache.trie import Node, ancestors
from perilune.serve.tiers.disk import DiskTier
from perilune.serve.tiers.host import HostTier
from perilune.serve.tiers.index import Prefix

log = logging.getLogger(__name__)

RESERVED_AT_ONCE = 2**28  # bytes: a tenth of a second
Contents = tuple[Sequence[Any], Sequence[Any]]  # of the pages of a prefix, and of those of its states


class PageAccess(Protocol):
    """Bytes of the pool's pages. What it gives as contents is its own business, but for `buffer`."""

    def reserve_host(self, count: int) -> None:
        """Have room for so many pages in all, if making it takes time."""
        ...

    def host_pages(self, count: int) -> Sequence[Any]:
        """Room for the contents of so many pages; each has a method `buffer`, where they are."""
        ...

    def read_bytes(self, pages: Sequence[int]) -> Sequence[Any]:
        """Contents of pages."""
        ...

    def write_bytes(self, pages: Sequence[int], contents: Sequence[Any]) -> Callable[[], None] | None:
        """Put contents into pages; returns None if they are there, else what waits for them."""
        ...


@dataclass(slots=True)
class TierCounts:
    """Counts since the tiers were made.

    Attributes:
        written_back: prefixes that went from the pool to the host.
        host_hits, disk_hits: prefixes that came back.
        tokens: tokens of these that were not in the pool.
        no_room: prefixes that could not come back because the pool was full.
        refused: prefixes for which the host had no memory, though less than its limit was in use.
    """

    written_back: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    tokens: int = 0
    no_room: int = 0
    refused: int = 0


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
        self._waits: ThreadPoolExecutor | None = None
        spill = self._spill if disk is not None else None
        self._host = HostTier(host_bytes, shape.page_bytes, shape.groups * shape.page_bytes, spill)
        self._arrivals = 0
        self._abandoned = False
        self._coming: dict[bytes, list[Callable[[], None]]] = {}  # what goes on once a prefix has come back
        cache.store.on_evict = self._write_back

    def preparations(self, longest: int) -> list[tuple[str, Callable[[], object]]]:
        """Memory of the host in pieces, all of the host tier's and what a prefix of so many tokens needs on its way from a disk:
        see `runner.preparations`."""
        shape = self._cache.geometry
        pages = self._host.index.limit // shape.page_bytes
        if self._disk is not None:
            pages += shape.pages_for(longest) + shape.groups
        at_once = max(1, RESERVED_AT_ONCE // shape.page_bytes)
        counts = [*range(at_once, pages, at_once), pages]
        return [("memory of the host", partial(self._reserve, count)) for count in counts]

    def _reserve(self, count: int) -> None:
        try:
            self._pages.reserve_host(count)
        except CapacityError as error:
            self._refuse(error)

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
        if not self._host.index.fits(prefix):
            return
        missing = [index for index, name in enumerate(prefix.pages) if not self._host.index.has_page(name)]
        try:
            contents = self._pages.read_bytes([table[index] for index in missing])
            state = self._pages.read_bytes(checkpoint.pages)
        except CapacityError as error:
            self._refuse(error)
            return
        self._host.put(prefix, {prefix.pages[index]: content for index, content in zip(missing, contents)}, state)
        self.counts.written_back += 1

    def _refuse(self, error: CapacityError) -> None:
        """The host has less memory than it was to give: what does not fit is lost, and nothing else."""
        if not self.counts.refused:
            log.warning("%s", error)
        self.counts.refused += 1

    def _spill(self, prefix: Prefix, pages: Mapping[bytes, Any], state: Sequence[Any]) -> None:
        assert self._files is not None and self._disk is not None, "there is a disk to spill to"
        disk = self._disk

        def write() -> None:
            if self._abandoned:
                return
            contents = {name: page.buffer() for name, page in pages.items() if not disk.index.has_page(name)}
            disk.put(prefix, contents, [page.buffer() for page in state])

        _beside(self._files, write)

    def prefetch(self, chain: TokenChain, then: Callable[[], None], post: Callable[[Callable[[], None]], None]) -> None:
        """Bring back what a prompt could skip, then go on.

        Args:
            chain: of the prompt.
            then: called at once, or, if files have to be read or pages fetched first, later on the engine's thread.
            post: leaves a command for the engine's thread, from another one.
        """
        unit = self._cache.geometry.unit
        match = self._cache.match(chain)
        above, up_to = match.resume // unit, match.limit // unit
        near = self._host.index.deepest(chain.digests, above, up_to)
        far = None
        if self._disk is not None:
            far = self._disk.deepest(chain.digests, near.depth // unit if near else above, up_to)
        prefix = far or near
        if prefix is None:
            then()
        elif prefix.digest in self._coming:  # another request has asked for it
            self._coming[prefix.digest].append(then)
        else:
            self._coming[prefix.digest] = [then]
            if far is not None:
                self._read(chain, far, post)
            else:
                self._restore(chain, prefix, self._host.get(prefix), "host_hits", post)

    def _go_on(self, prefix: Prefix) -> None:
        """Those that waited for a prefix do so no more."""
        for then in self._coming.pop(prefix.digest):
            then()

    def _read(self, chain: TokenChain, prefix: Prefix, post: Callable[[Callable[[], None]], None]) -> None:
        """Bring back a prefix from the disk."""
        assert self._files is not None and self._disk is not None, "there is a disk to read from"
        disk, groups = self._disk, self._cache.geometry.groups

        def read() -> None:
            contents, whole = ((), ()), False
            try:
                pages = self._pages.host_pages(len(prefix.pages) + groups)
                buffers = [page.buffer() for page in pages]
                whole = disk.get(prefix, buffers[groups:], buffers[:groups])
                contents = pages[groups:], pages[:groups]
            except CapacityError as error:
                self._refuse(error)
            except Exception:  # whatever it was, the request need not wait for it
                log.exception("a prefix cannot be read from the disk; it is computed again")
            post(
                lambda: self._restore(chain, prefix, contents, "disk_hits", post) if whole else self._go_on(prefix)
            )  # fmt: skip

        _beside(self._files, read)

    def _restore(
        self, chain: TokenChain, prefix: Prefix, contents: Contents, kind: str, post: Callable[[Callable[[], None]], None]
    ) -> None:  # fmt: skip
        """Put a prefix into the pool, as an engine would that was sent it; `kind` is counted if it was needed there."""
        incoming = self._receive(chain, prefix)
        if incoming is None:
            self._go_on(prefix)
            return
        pages, state = contents
        first = incoming.start // self._cache.geometry.page_tokens
        new = pages[first : first + len(incoming.pages)]
        wait = self._pages.write_bytes([*incoming.pages, *incoming.state], [*new, *state])

        def arrive() -> None:
            for part in sorted(incoming.parts):
                self._cache.arrived(incoming.name, part)
            setattr(self.counts, kind, getattr(self.counts, kind) + 1)
            self._go_on(prefix)

        if wait is None:
            arrive()
            return
        if self._waits is None:
            self._waits = ThreadPoolExecutor(1, "perilune-fetch")

        def fetch() -> None:
            wait()
            post(arrive)

        _beside(self._waits, fetch)

    def _receive(self, chain: TokenChain, prefix: Prefix) -> Incoming | None:
        """Pages of the pool for a prefix; None if it is there already, or there is no room."""
        resume = self._cache.match(chain).resume
        if resume >= prefix.depth:  # somebody else computed it meanwhile
            return None
        self._arrivals += 1
        incoming = self._cache.receive(f"tier {self._arrivals}", chain, prefix.depth)
        if incoming is None:
            self.counts.no_room += 1
            return None
        self.counts.tokens += prefix.depth - resume
        return incoming

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
            "no_room_total": counts.no_room, "host_refused_total": counts.refused,
        }  # fmt: skip

    def abandon(self) -> None:
        """Write nothing more to the disk, from any thread: the process is to end now. What is whole there stays."""
        self._abandoned = True

    def close(self) -> None:
        """Write everything to disk, if there is one, and end; the next process finds it."""
        self._cache.store.on_evict = None
        if self._files is not None and self._disk is not None:
            nodes = list(self._cache.store.checkpoints.values())
            if not self._abandoned and (nodes or len(self._host.index)):
                log.info("writing what is cached to %s", self._disk.folder)
            for node in nodes:
                if not self._abandoned:
                    self._write_back(node)
            self._host.spill_all()
            self._files.shutdown(wait=True)
        if self._disk is not None:
            self._disk.close()
        if self._waits is not None:
            self._waits.shutdown(wait=True)


def _beside(executor: Executor, work: Callable[[], object]) -> None:
    """Do something on a thread of an executor; on this one while the process ends and no executor takes work any more."""
    try:
        executor.submit(work)
    except RuntimeError:
        work()
