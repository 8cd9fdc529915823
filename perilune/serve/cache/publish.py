"""Entering what a step computed: its prefixes into the tree, its states as checkpoints, and recycling superseded ones."""

from __future__ import annotations

from perilune.serve.cache.lease import ChunkRecord, Lease
from perilune.serve.cache.plans import ExportState
from perilune.serve.cache.retention import RECYCLED
from perilune.serve.cache.store import CacheStore
from perilune.serve.cache.trie import Checkpoint, Node


class Publisher:
    """Enters the results of finished steps into a store."""

    def __init__(self, store: CacheStore) -> None:
        self.store = store
        self.geometry = store.geometry

    def commit(self, record: ChunkRecord, end: int) -> None:
        """Enter a chunk whose first tokens, up to `end`, stand; what it wrote beyond is dropped."""
        lease, unit = record.lease, self.geometry.unit
        units = min(end // unit, len(lease.chain.digests))
        if units == lease.published and not record.exports:
            return
        self.enter(lease, units)
        for position, reason in record.found:
            if position <= units * unit:
                self._want_checkpoint(lease, self._node_at(lease, position), reason)
        for export in record.exports:
            if export.position <= units * unit:
                self.enter_checkpoint(lease, export)
            else:
                self.store.drop(export.targets)

    def _node_at(self, lease: Lease, position: int) -> Node:
        return self.store.trie.nodes[lease.chain.digests[position // self.geometry.unit - 1]]

    def enter(self, lease: Lease, units: int) -> None:
        """Enter a sequence's units up to this many, or find that they have been entered."""
        store, unit, size = self.store, self.geometry.unit, self.geometry.page_tokens
        last, held, pages, find = lease.last_node, lease.held, lease.pages, store.trie.nodes.get
        for index in range(lease.published, units):
            digest = lease.chain.digests[index]
            node = find(digest)
            if node is None:
                node = store.enter(digest, (index + 1) * unit, last, pages[index * unit // size])
            elif node.page not in held:
                # Another request was first, and our page stays ours alone. What we enter below hangs on its page: hold it,
                # as a running request holds all pages of its prefix. So what is held is closed towards the root, and every
                # page that nobody holds can be evicted, leaves first.
                store.hold((node.page,))
                held.add(node.page)
            last = node
        if last is not lease.last_node:
            store.use(last, instead_of=lease.last_node)
            lease.last_node, lease.published = last, units

    def enter_checkpoint(self, lease: Lease, export: ExportState) -> None:
        """Enter states that have been written, or let their pages go if the prefix has a checkpoint."""
        node = self._node_at(lease, export.position)
        if node.checkpoint is None:
            self.store.enter_checkpoint(node, export.targets, export.position, export.reason)
        else:
            self.store.drop(export.targets)
        self._want_checkpoint(lease, node, export.reason)

    def _want_checkpoint(self, lease: Lease, node: Node, reason: str) -> None:
        """A request has come to a checkpoint, its own or one that it found; the last one it only passed is superseded."""
        checkpoint = node.checkpoint
        if checkpoint is None:
            return  # one that was found, and has been evicted since
        superseded, lease.rolling = lease.rolling, None
        if reason in RECYCLED:
            checkpoint.claims += 1
            lease.rolling = node, checkpoint
        elif checkpoint.reason in RECYCLED:
            checkpoint.reason = reason
        if superseded is not None:
            self._recycle(*superseded)

    def _recycle(self, node: Node, checkpoint: Checkpoint) -> None:
        """Drop a checkpoint once all requests that passed it have a later one, unless somebody resumed from it."""
        checkpoint.claims -= 1
        if node.checkpoint is not checkpoint or checkpoint.claims or checkpoint.hits:
            return  # evicted, and the node may have another one by now; or still wanted
        if checkpoint.reason in RECYCLED and self.store.pool.is_evictable(checkpoint.pages[0]):
            self.store.counters.checkpoints_recycled[checkpoint.reason] += 1
            self.store.lose_checkpoint(node, "recycled: its request went on")
