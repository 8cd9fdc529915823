"""Prefixes that come from elsewhere: from another engine that prefilled them, or from a slower tier of memory.

Pages are taken first, all or none. Then the parts arrive in any order, and only when all have, the prefix is entered: tokens
without states, or states of some groups only, are no hit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from perilune.serve.cache.admission import hit_pages
from perilune.serve.cache.hashing import TokenChain
from perilune.serve.cache.lease import Lease
from perilune.serve.cache.plans import ExportState
from perilune.serve.cache.publish import Publisher
from perilune.serve.cache.retention import IMPORT
from perilune.serve.cache.store import CacheStore

TOKENS_PART, STATE_PART = "tokens", "state"


@dataclass(frozen=True, slots=True)
class Incoming:
    """Where a transfer writes.

    Attributes:
        name: of the transfer.
        start: first token to transfer; what stands before is cached here already. A multiple of the page.
        end: behind the last one.
        pages: for the tokens from `start` on.
        state: for the checkpoint at `end`, one for each cache group.
        parts: what must arrive: "tokens", and "state" of each group as "state 0", "state 1", …
    """

    name: str
    start: int
    end: int
    pages: tuple[int, ...]
    state: tuple[int, ...]
    parts: frozenset[str]


class Transfers:
    """Transfers under way.

    Args:
        store: takes the pages from here.
        publisher: enters what has arrived.
    """

    def __init__(self, store: CacheStore, publisher: Publisher) -> None:
        self.store, self.publisher = store, publisher
        self._under_way: dict[str, tuple[Lease, Incoming, set[str]]] = {}

    def leases(self) -> Iterator[Lease]:
        """What they own."""
        for lease, _, _ in self._under_way.values():
            yield lease

    def states(self) -> Iterator[tuple[int, ...]]:
        """Pages of the checkpoints that are arriving."""
        for _, incoming, _ in self._under_way.values():
            yield incoming.state

    def receive(self, name: str, chain: TokenChain, tokens: int) -> Incoming | None:
        """See `HybridCache.receive`."""
        shape = self.store.geometry
        assert name not in self._under_way, f"transfer {name!r} is under way already"
        assert 0 < tokens <= len(chain) and tokens % shape.unit == 0, (
            f"{tokens} tokens are no whole units of the prefix"
        )
        match = self.store.trie.match(chain.digests, tokens + 1)
        assert match.resume < tokens, f"the prefix of {tokens} tokens is cached already"
        node = self.store.trie.nodes[chain.digests[match.known // shape.unit - 1]] if match.known else None
        hit = hit_pages(node, shape)
        whole = match.known // shape.page_tokens
        start = match.known if match.known == tokens else whole * shape.page_tokens
        own = shape.pages_for(tokens) - whole if match.known < tokens else 0
        self.store.use(node)
        self.store.hold(hit.held)
        if not self.store.make_room(own + shape.groups):
            self.store.use(None, instead_of=node)
            self.store.drop(hit.held)
            return None
        state, pages = self.store.take_state(), self.store.take_tokens(own)
        lease = Lease(
            request=name, chain=chain, prompt=tokens + 1, turn_ends=[], junction=0, resume=match.known,
            pages=hit.table[:whole] + pages, held=hit.held | set(pages), state=(), spare=(), sources=(), operations=(),
            scheduled=tokens, published=match.known // shape.unit, last_node=node,
        )  # fmt: skip
        parts = {f"{STATE_PART} {group}" for group in range(shape.groups)} | ({TOKENS_PART} if pages else set())
        incoming = Incoming(name, start, tokens, tuple(pages), state, frozenset(parts))
        self._under_way[name] = lease, incoming, set(parts)
        return incoming

    def arrived(self, name: str, part: str) -> bool:
        """See `HybridCache.arrived`."""
        lease, incoming, missing = self._under_way[name]
        assert part in missing, f"transfer {name!r}: part {part!r} is not missing; missing: {sorted(missing)}"
        missing.discard(part)
        if missing:
            return False
        if lease.publishing:
            self.publisher.enter(lease, incoming.end // self.store.geometry.unit)
            if incoming.state:
                self.publisher.enter_checkpoint(lease, ExportState(incoming.end, incoming.state, IMPORT))
        else:
            self.store.drop(incoming.state)
        self._close(name)
        return True

    def cancel(self, name: str) -> None:
        """See `HybridCache.cancel_transfer`."""
        self.store.drop(self._under_way[name][1].state)
        self._close(name)

    def _close(self, name: str) -> None:
        lease, _, _ = self._under_way.pop(name)
        self.store.use(None, instead_of=lease.last_node)
        self.store.drop(lease.held)
