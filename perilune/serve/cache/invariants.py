"""What must always hold between pool, tree and requests, written a second time and checked against the bookkeeping."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

from perilune.serve.cache.block_pool import FREE, STATE, TOKENS
from perilune.serve.cache.lease import Lease, Pin, Step
from perilune.serve.cache.store import CacheStore
from perilune.serve.cache.trie import ancestors


def check_store(store: CacheStore, sample: int | None) -> None:
    """Check pages, and the prefixes and checkpoints that they serve; all, or `sample` of them.

    Raises:
        AssertionError: with what is wrong.
    """
    pool, trie = store.pool, store.trie
    pages = range(pool.pages) if sample is None else random.sample(range(pool.pages), min(sample, pool.pages))
    for page in pages:
        kind, holders, bindings = pool.kind(page), pool.holders(page), pool.bindings(page)
        assert (kind == FREE) == (not holders and not bindings), f"page {page}: {kind=}, {holders=}, {bindings=}"
        assert pool.is_evictable(page) == bool(bindings and not holders), f"page {page} is marked wrongly"
        if kind != TOKENS:
            assert page not in trie.of_page, f"page {page} holds no tokens, but prefixes name it"
            assert bindings <= 1, f"page {page} belongs to {bindings} checkpoints"
        else:
            _check_token_page(store, page)
    used = sum(pool.count(kind, bound=bound) for kind in (TOKENS, STATE) for bound in (False, True))
    assert pool.free + used == pool.pages, f"{pool.free} free and {used} used pages of {pool.pages}"
    assert pool.evictable >= 0, f"{pool.evictable} evictable pages"
    chosen = list(store.checkpoints.items()) if sample is None else _some(store, pages)
    for first, node in chosen:
        checkpoint = node.checkpoint
        assert checkpoint is not None and checkpoint.pages[0] == first, f"no checkpoint begins at page {first}"
        assert len(checkpoint.pages) == store.geometry.groups, f"a checkpoint of {len(checkpoint.pages)} groups"
        assert (checkpoint.digest, checkpoint.depth) == (node.digest, node.depth), "a checkpoint at another prefix"
        assert trie.nodes.get(node.digest) is node, f"the checkpoint of {node.depth} tokens has no prefix"
        for page in checkpoint.pages:
            assert pool.kind(page) == STATE and pool.bindings(page) == 1, f"page {page} is lost to its checkpoint"
            assert pool.is_evictable(page) == pool.is_evictable(first), "groups of a checkpoint are held differently"


def _some(store: CacheStore, pages: Iterable[int]) -> list[tuple]:
    return [(page, store.checkpoints[page]) for page in pages if page in store.checkpoints]


def _check_token_page(store: CacheStore, page: int) -> None:
    pool, trie, size = store.pool, store.trie, store.geometry.page_tokens
    nodes = trie.of_page.get(page, [])
    assert pool.bindings(page) == len(nodes), f"page {page}: {pool.bindings(page)} bindings for {len(nodes)} prefixes"
    for node in nodes:
        assert node.page == page and trie.nodes.get(node.digest) is node, f"page {page} serves a prefix that is gone"
        assert (node.depth - 1) // size == (nodes[0].depth - 1) // size, f"page {page} serves two ranges of tokens"
        parent = node.parent
        assert (parent is None) == (node.depth == trie.unit), f"the prefix of {node.depth} tokens hangs wrongly"
        if parent is not None:
            assert parent.depth == node.depth - trie.unit, "a prefix is not one unit longer than its parent"
            assert trie.nodes.get(parent.digest) is parent, f"the prefix of {node.depth} tokens has lost its parent"


def check_users(
    store: CacheStore, leases: list[Lease], steps: Iterable[Step], pins: list[Pin], arriving: Iterable[tuple[int, ...]]
) -> None:
    """Count every page's holders anew, and check each request's table.

    Raises:
        AssertionError: with what is wrong.
    """
    holders: Counter[int] = Counter()
    users = Counter(lease.last_node for lease in leases) + Counter(pin.node for pin in pins)
    children = Counter(node.parent for node in store.trie.nodes.values())
    for node in store.trie.nodes.values():
        assert node.users == users[node], (
            f"the prefix of {node.depth} tokens has {node.users} users, {users[node]} by name"
        )
        if node.users:
            lost = [n.page for n in ancestors(node) if store.pool.is_evictable(n.page)]
            assert not lost, f"pages {lost} of a prefix in use could be evicted"
        assert node.children == children[node], f"the prefix of {node.depth} tokens has {children[node]} children"
    for lease in leases:
        holders.update(lease.held)
        holders.update((*lease.state, *lease.spare, *lease.sources))
        assert set(lease.pages) <= lease.held, f"request {lease.request!r} does not hold its table"
        assert len(set(lease.pages)) == len(lease.pages), f"request {lease.request!r} has a page twice"
        assert lease.resume < lease.prompt, f"request {lease.request!r} skips its whole prompt"
        if lease.publishing and lease.last_node is not None:
            assert lease.last_node.depth == lease.published * store.trie.unit, "a request lost its place in the tree"
    for step in steps:
        for record in step.records:
            for export in record.exports:
                holders.update(export.targets)
    for pin in pins:
        holders.update(pin.held)
    for pages in arriving:
        holders.update(pages)
    for page in range(store.pool.pages):
        found = store.pool.holders(page)
        assert found == holders[page], f"page {page} has {found} holders by count, {holders[page]} by name"
    private = Counter(page for lease in leases for page in lease.state)
    assert all(count == 1 for count in private.values()), "two requests share a running state"
    evictable = sum(store.pool.is_evictable(page) for page in range(store.pool.pages))
    assert evictable == store.pool.evictable, f"{evictable} pages can be evicted, {store.pool.evictable} by count"
