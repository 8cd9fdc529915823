"""What to give up when pages run out: what saves least work for its bytes, and what was not used for long.

Two things can go: a checkpoint, and the end of a cached prefix: its units in one page, with the checkpoints on them, which
nearly always is all that the page holds. Each has a priority

    stamp + (tokens that a hit would have to compute again without it) * (hits so far + hits to expect) / pages

and the lowest goes first. `stamp` is the queue's clock when the thing was last used, and the clock stands at the priority
of the last thing that went. So the clock ages everything that is not used, in the same units as the work saved: an old,
valuable checkpoint and a fresh, cheap one compete. (The scheme is the greedy-dual one with frequencies, known from web
caches; work saved per byte is Marconi's criterion for hybrid models.)

The work that a checkpoint saves is counted from the next shallower one of its prefix. Where checkpoints stand close
together each saves little, and once one has gone its successor saves more, so gaps grow evenly without a rule for it.
`END` hits are expected where a prefix ends, since conversations grow there, one at a junction, which has been seen twice, and
`INNER` elsewhere. So what thins out first is the inside of a prefix, not its end. With the checkpoint at the end the tokens
before it become useless, back to where something else needs them: their pages count as its bytes, too. Cached tokens behind
the last checkpoint of their prefix save nothing and go before all else.
"""

from __future__ import annotations

import heapq

from perilune.errors import ConfigError
from perilune.serve.cache.block_pool import BlockPool
from perilune.serve.cache.retention import JUNCTION
from perilune.serve.cache.trie import Checkpoint, Node, PrefixTrie, ancestors

ORDERS = ("work", "recency")
# Hits to expect, set by replaying `perilune.bench.cache_traces`: a conversation's next turn is likelier than a fork inside.
END, INNER = 2.0, 0.25


class EvictionQueue:
    """A heap of candidates. Entries go out of date and are checked when they come up.

    Args:
        trie, pool: what is cached, and where.
        groups: pages of a checkpoint.
        page_tokens: tokens of a page.
        order: "work" = as above; "recency" = least recently used first, whatever it saves.

    Raises:
        ConfigError: another order.
    """

    def __init__(self, trie: PrefixTrie, pool: BlockPool, groups: int, page_tokens: int, order: str = "work") -> None:
        if order not in ORDERS:
            raise ConfigError(f"eviction={order!r} is not known; allowed: {', '.join(ORDERS)}")
        self._trie, self._pool, self._groups, self._by_work = trie, pool, groups, order == "work"
        self._page_tokens = page_tokens
        self._clock = 0.0
        self._stamps = [0.0] * pool.pages
        # priority, number, node, its checkpoint (None: the prefix itself), version of the node or the checkpoint
        self._heap: list[tuple[float, int, Node, Checkpoint | None, int]] = []
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
        """Make the ends of prefixes in a page candidates, as far as they are."""
        for node in self._trie.of_page.get(page, ()):
            if node.is_loose:
                self.offer(node)

    def offer(self, node: Node) -> None:
        """Make the end of a prefix a candidate if it is one."""
        if self._can_go(node):
            node.version += 1
            self._push(self._run_priority(node), node, None, node.version)

    def offer_checkpoint(self, node: Node) -> None:
        """Make a node's checkpoint a candidate if nobody holds it."""
        checkpoint = node.checkpoint
        if checkpoint is not None and self._pool.is_evictable(checkpoint.pages[0]):
            checkpoint.version += 1
            self._push(self._checkpoint_priority(node, checkpoint), node, checkpoint, checkpoint.version)

    def _can_go(self, node: Node) -> bool:
        """Whether evicting the end of a prefix brings nearer that its page is free.

        Not while somebody holds the page, nor while earlier units in the page are the beginning of something else. Those
        may also stand in the page behind a unit that another request entered first, into a page of its own: that page
        comes free only after this end has gone.
        """
        if not node.is_loose or not self._pool.is_evictable(node.page) or self._trie.nodes.get(node.digest) is not node:
            return False
        run = self._trie.run(node)
        return len(run) == self._pool.bindings(node.page) or _hangs_on_another_page(run)

    def _push(self, priority: float, node: Node, checkpoint: Checkpoint | None, version: int) -> None:
        self._entries += 1
        heapq.heappush(self._heap, (priority, self._entries, node, checkpoint, version))
        if len(self._heap) > 4 * self._pool.pages + 64:  # mostly entries out of date
            self._heap = [entry for entry in self._heap if self._is_current(*entry[2:])]
            heapq.heapify(self._heap)

    def _is_current(self, node: Node, checkpoint: Checkpoint | None, version: int) -> bool:
        if checkpoint is None:
            return version == node.version and self._can_go(node)
        current = node.checkpoint is checkpoint and version == checkpoint.version
        return current and self._pool.is_evictable(checkpoint.pages[0])

    def pop(self) -> tuple[Node, bool]:
        """The candidate that is worth least, which the caller must evict now: a node, and whether only its checkpoint."""
        while self._heap:
            priority, _, node, checkpoint, version = heapq.heappop(self._heap)
            if not self._is_current(node, checkpoint, version):
                continue
            # What it saves may have grown since: a shallower checkpoint of its prefix is gone.
            now = self._run_priority(node) if checkpoint is None else self._checkpoint_priority(node, checkpoint)
            if now > priority:
                self._push(now, node, checkpoint, version)
                continue
            if self._by_work:
                self._clock = max(self._clock, priority)
            return node, checkpoint is not None
        return self._blocking(), False

    def _blocking(self) -> Node:
        """The end of a prefix in a held page that keeps a page which nobody holds; only two requests that entered units
        of the same prefix by turns leave such a thing, so it may take a search."""
        for node in self._trie.nodes.values():
            if node.is_loose and _hangs_on_another_page(self._trie.run(node)):
                return node
        raise AssertionError(f"{self._pool.evictable} pages can be evicted, but none is a candidate")

    def _checkpoint_priority(self, node: Node, checkpoint: Checkpoint) -> float:
        if not self._by_work:
            return checkpoint.stamp
        saved, useless = self._at_stake(node, checkpoint.depth)
        if not node.children:
            return checkpoint.stamp + saved * (END + checkpoint.hits) / (self._groups + useless)
        expected = 1.0 if checkpoint.reason == JUNCTION else INNER
        return checkpoint.stamp + saved * (expected + checkpoint.hits) / self._groups

    def _run_priority(self, node: Node) -> float:
        stamp = self._stamps[node.page]
        if not self._by_work:
            return stamp
        run = self._trie.run(node)
        if not self._trie.stateful:
            return stamp + float(len(run) * self._trie.unit)
        marked = [(node, node.checkpoint) for node in run if node.checkpoint is not None]  # deepest first
        if not marked:
            return stamp
        saved, useless = self._at_stake(marked[-1][0], marked[0][0].depth)
        hits = END + max(checkpoint.hits for _, checkpoint in marked)
        return stamp + saved * hits / (1 + self._groups * len(marked) + useless)

    def _at_stake(self, node: Node, depth: int) -> tuple[int, float]:
        """Tokens between `depth` and the next checkpoint before `node`, or the beginning; and the pages of those among
        them that nothing else needs."""
        saved, alone, units = depth, True, 0
        for earlier in ancestors(node.parent):
            if earlier.checkpoint is not None:
                saved -= earlier.depth
                break
            alone = alone and earlier.children == 1 and not earlier.users
            units += alone
        return saved, units * self._trie.unit / self._page_tokens


def _hangs_on_another_page(run: list[Node]) -> bool:
    parent = run[-1].parent
    return parent is not None and parent.page != run[-1].page
