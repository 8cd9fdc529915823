"""What to give up when pages run out: what saves least work for its bytes, and what was not used for long.

Two things can go: a checkpoint, and a leaf page of cached tokens with the checkpoints on it. Each has a priority

    stamp + (tokens that a hit would have to compute again without it) * (1 + hits) / pages

and the lowest goes first. `stamp` is the queue's clock when the thing was last used, and the clock stands at the priority
of the last thing that went. So the clock ages everything that is not used, in the same units as the work saved: an old,
valuable checkpoint and a fresh, cheap one compete. (The scheme is the greedy-dual one with frequencies, known from web
caches; work saved per byte is Marconi's criterion for hybrid models.)

The work that a checkpoint saves is counted from the next shallower one of its prefix. Where checkpoints stand close
together each saves little, and once one has gone its successor saves more: the gaps stay geometric without a rule for it.
Cached tokens behind the last checkpoint of their prefix save nothing and go first.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from perilune.errors import ConfigError
from perilune.serve.cache.block_pool import BlockPool
from perilune.serve.cache.trie import Checkpoint, Node, PrefixTrie, ancestors

ORDERS = ("work", "recency")


@dataclass(frozen=True, slots=True)
class Victim:
    """What goes: a leaf page (`node` is None), or the checkpoint of a node (`page` is -1)."""

    page: int
    node: Node | None


class EvictionQueue:
    """A heap of candidates. Entries go out of date and are checked when they come up.

    Args:
        trie, pool: what is cached, and where.
        groups: pages of a checkpoint.
        order: "work" = as above; "recency" = least recently used first, whatever it saves.

    Raises:
        ConfigError: another order.
    """

    def __init__(self, trie: PrefixTrie, pool: BlockPool, groups: int, order: str = "work") -> None:
        if order not in ORDERS:
            raise ConfigError(f"eviction={order!r} is not known; allowed: {', '.join(ORDERS)}")
        self._trie, self._pool, self._groups, self._by_work = trie, pool, groups, order == "work"
        self._clock = 0.0
        self._stamps = [0.0] * pool.pages
        self._versions = [0] * pool.pages
        self._heap: list[tuple[float, int, int, Node | None, Checkpoint | None, int]] = []
        self._entries = 0  # tells entries of equal priority apart, older ones first

    def __len__(self) -> int:
        """Entries, those out of date included."""
        return len(self._heap)

    def touch_page(self, page: int) -> None:
        """The page was just used."""
        self._stamps[page] = self._now()

    def touch_checkpoint(self, checkpoint: Checkpoint) -> None:
        """The checkpoint was just used or made."""
        checkpoint.stamp = self._now()

    def _now(self) -> float:
        if not self._by_work:
            self._clock += 1.0
        return self._clock

    def offer_page(self, page: int) -> None:
        """Make a page a candidate if it is one: cached, held by nobody, a leaf."""
        if self._pool.is_evictable(page) and self._trie.is_leaf(page):
            self._versions[page] += 1
            self._push(self._page_priority(page), page, None, None, self._versions[page])

    def offer_checkpoint(self, node: Node) -> None:
        """Make a node's checkpoint a candidate if nobody holds it."""
        checkpoint = node.checkpoint
        if checkpoint is not None and self._pool.is_evictable(checkpoint.pages[0]):
            checkpoint.version += 1
            self._push(self._checkpoint_priority(node, checkpoint), -1, node, checkpoint, checkpoint.version)

    def _push(self, priority: float, page: int, node: Node | None, checkpoint: Checkpoint | None, version: int) -> None:
        self._entries += 1
        heapq.heappush(self._heap, (priority, self._entries, page, node, checkpoint, version))
        if len(self._heap) > 4 * self._pool.pages + 64:  # mostly entries out of date
            self._heap = [entry for entry in self._heap if self._is_current(*entry[2:])]
            heapq.heapify(self._heap)

    def _is_current(self, page: int, node: Node | None, checkpoint: Checkpoint | None, version: int) -> bool:
        if node is None:
            # The page may hold a checkpoint by now: then no prefix names it.
            return (
                version == self._versions[page]
                and page in self._trie.of_page
                and self._pool.is_evictable(page)
                and self._trie.is_leaf(page)
            )
        assert checkpoint is not None, "an entry of a node has the checkpoint it was made for"
        return (
            node.checkpoint is checkpoint
            and version == checkpoint.version
            and self._pool.is_evictable(checkpoint.pages[0])
        )

    def pop(self) -> Victim:
        """The candidate that is worth least, which the caller must now evict."""
        while self._heap:
            priority, _, page, node, checkpoint, version = heapq.heappop(self._heap)
            if not self._is_current(page, node, checkpoint, version):
                continue
            # What it saves may have grown since: a shallower checkpoint of its prefix is gone.
            now = self._page_priority(page) if node is None else self._checkpoint_priority(node, checkpoint)
            if now > priority:
                self._push(now, page, node, checkpoint, version)
                continue
            if self._by_work:
                self._clock = max(self._clock, priority)
            return Victim(page, node)
        raise AssertionError(f"{self._pool.evictable} pages can be evicted, but none is a candidate")

    def _checkpoint_priority(self, node: Node, checkpoint: Checkpoint) -> float:
        if not self._by_work:
            return checkpoint.stamp
        return checkpoint.stamp + _saved(node, checkpoint.depth) * (1 + checkpoint.hits) / self._groups

    def _page_priority(self, page: int) -> float:
        stamp = self._stamps[page]
        if not self._by_work:
            return stamp
        nodes = self._trie.of_page[page]
        if not self._trie.stateful:
            return stamp + float(len(nodes) * self._trie.unit)
        marked = [node for node in nodes if node.checkpoint is not None]
        if not marked:
            return stamp
        deepest = max(marked, key=lambda node: node.depth)
        first = min(marked, key=lambda node: node.depth)
        hits = max(node.checkpoint.hits for node in marked)
        return stamp + _saved(first, deepest.depth) * (1 + hits) / (1 + self._groups * len(marked))


def _saved(node: Node, depth: int) -> int:
    """Tokens between `depth` and the next checkpoint before `node`, or the beginning."""
    for earlier in ancestors(node.parent):
        if earlier.checkpoint is not None:
            return depth - earlier.depth
    return depth
