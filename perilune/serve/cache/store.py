"""What is cached: the tree of prefixes with the pages it binds, and how pages come in, are evicted, and are lost.

A checkpoint is bound and lost as a whole: with one cache group's page go those of its siblings, and with a page of tokens
go the checkpoints of its prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from perilune.serve.cache.block_pool import FREE, STATE, TOKENS, BlockPool
from perilune.serve.cache.eviction import EvictionQueue
from perilune.serve.cache.explain import Losses
from perilune.serve.cache.geometry import CacheGeometry
from perilune.serve.cache.metrics import Counters
from perilune.serve.cache.trie import Checkpoint, Node, PrefixTrie


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A change of what is cached, for routers that keep an approximate index of several engines.

    Attributes:
        stored: True = entered, False = gone.
        component: "tokens" or "state"; a prefix can be resumed where it has both.
        digest: of the prefix.
        depth: its tokens.
    """

    stored: bool
    component: str
    digest: bytes
    depth: int


class CacheStore:
    """Pool, tree and eviction queue, kept consistent with each other.

    Args:
        geometry: sizes.
        pages: of the pool.
        eviction: order of eviction, see `eviction`.

    Attributes:
        on_event: called with each change, or None.
        on_evict: called with a node whose checkpoint is about to be evicted, while its pages and those of its prefix are
            still what they were; or None.
        checkpoints: the node of each checkpoint, by the checkpoint's first page.
    """

    def __init__(self, geometry: CacheGeometry, pages: int, eviction: str = "work") -> None:
        self.geometry = geometry
        self.pool = BlockPool(pages)
        self.trie = PrefixTrie(geometry.unit, stateful=geometry.groups > 0)
        self.queue = EvictionQueue(self.trie, self.pool, geometry.groups, geometry.page_tokens, eviction)
        self.counters = Counters()
        self.losses = Losses()
        self.checkpoints: dict[int, Node] = {}
        self.on_event: Callable[[CacheEvent], None] | None = None
        self.on_evict: Callable[[Node], None] | None = None

    # ---- holding

    def hold(self, *lots: Iterable[int]) -> None:
        """One more holder for each page."""
        for lot in lots:
            for page in lot:
                self.pool.hold(page)

    def use(self, node: Node | None, instead_of: Node | None = None) -> None:
        """A request's or a pin's prefix ends at `node` now, and at `instead_of` no more."""
        if node is not None:
            node.users += 1
        if instead_of is not None:
            instead_of.users -= 1
            self.queue.offer(instead_of)

    def drop(self, *lots: Iterable[int]) -> None:
        """One holder less for each page; cached pages that nobody holds now count as just used."""
        for lot in lots:
            for page in lot:
                self.pool.drop(page)
                if self.pool.is_evictable(page):
                    self._offer(page)

    def _offer(self, page: int) -> None:
        if self.pool.kind(page) == TOKENS:
            self.queue.touch_page(page)
            self.queue.offer_page(page)
        elif page in self.checkpoints:
            self.queue.offer_checkpoint(self.checkpoints[page])

    def take_tokens(self, count: int) -> list[int]:
        """Free pages for tokens; `make_room` first."""
        return self.pool.take(count, TOKENS)

    def take_state(self) -> tuple[int, ...]:
        """Free pages for the states of all recurrent layers; `make_room` first."""
        return tuple(self.pool.take(self.geometry.groups, STATE))

    # ---- entering

    def enter(self, digest: bytes, depth: int, parent: Node | None, page: int) -> Node:
        """A new prefix whose last unit is in `page`, which the caller holds."""
        node = self.trie.add(digest, depth, parent, page)
        self.pool.bind(page)
        self.losses.forget(digest)
        self._tell(True, "tokens", node)
        return node

    def enter_checkpoint(self, node: Node, pages: tuple[int, ...], depth: int, reason: str) -> Checkpoint:
        """States of `depth` tokens for a prefix that has none; the caller's hold on the pages ends."""
        assert node.checkpoint is None, f"the prefix of {node.depth} tokens has a checkpoint, which is immutable"
        assert node.depth == depth, f"states of {depth} tokens at a prefix of {node.depth}"
        checkpoint = node.checkpoint = Checkpoint(pages, depth, node.digest, reason)
        self.checkpoints[pages[0]] = node
        for page in pages:
            self.pool.bind(page)
            self.pool.drop(page)
        self.counters.checkpoints_created[reason] += 1
        self.queue.touch_checkpoint(checkpoint)
        self.queue.offer_checkpoint(node)
        self.losses.forget(node.digest)
        self._tell(True, "state", node)
        return checkpoint

    def lose_checkpoint(self, node: Node, why: str) -> None:
        """Take a checkpoint out of the cache with the pages of all its groups."""
        checkpoint = node.checkpoint
        assert checkpoint is not None, f"the prefix of {node.depth} tokens has no checkpoint to lose"
        node.checkpoint = None
        del self.checkpoints[checkpoint.pages[0]]
        for page in checkpoint.pages:
            self.pool.unbind(page)
        self.queue.offer_page(node.page)  # worth less now, if it is an end
        self.losses.note(node.digest, f"checkpoint {why}")
        self._tell(False, "state", node)

    # ---- evicting

    def make_room(self, count: int) -> bool:
        """Evict until `count` pages are free; False, and nothing is evicted, if there cannot be so many."""
        if count > self.pool.available:
            return False
        while self.pool.free < count:
            node, only_state = self.queue.pop()
            if only_state:
                self._evict_checkpoint(node)
            else:
                self._evict_end(node)
        return True

    def _evict_checkpoint(self, node: Node) -> None:
        checkpoint = node.checkpoint
        assert checkpoint is not None, "the queue names checkpoints that exist"
        if self.on_evict is not None:
            self.on_evict(node)
        self.counters.checkpoints_evicted[checkpoint.reason] += 1
        self.counters.checkpoints_unused += not checkpoint.hits
        self.lose_checkpoint(node, "evicted")

    def _evict_end(self, node: Node) -> None:
        nodes = self.trie.run(node)
        self.trie.remove(nodes)
        for node in nodes:
            if node.checkpoint is not None:
                self._evict_checkpoint(node)
            self.losses.note(node.digest, "tokens evicted")
            self._tell(False, "tokens", node)
            self.pool.unbind(node.page)
        self.counters.pages_evicted += self.pool.kind(nodes[0].page) == FREE
        parent = nodes[-1].parent
        if parent is not None:
            self.queue.offer_page(parent.page)  # not touched: it was used no later than what hung on it

    def forget_all(self) -> None:
        """Empty the tree; pages that are held stay with their holders until these drop them."""
        for node in list(self.checkpoints.values()):
            self.lose_checkpoint(node, "dropped when everything was forgotten")
        nodes = list(self.trie.nodes.values())
        self.trie.clear()
        for node in nodes:
            self.pool.unbind(node.page)
            self._tell(False, "tokens", node)
        self.losses.clear()
        self.counters.resets += 1

    def _tell(self, stored: bool, component: str, node: Node) -> None:
        if self.on_event is not None:
            self.on_event(CacheEvent(stored, component, node.digest, node.depth))
