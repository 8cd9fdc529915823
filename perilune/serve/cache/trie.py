"""The index of cached prefixes: a tree of hash units, found by digest, and the one walk that matches a prompt.

A node is the end of a unit. It names the page with that unit's tokens, and may carry a checkpoint: the states of all
recurrent layers at that point. A node is in the tree only while its parent is, so the pages of a prefix are there exactly
as far as a walk from the first unit finds nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


class Checkpoint:
    """States of all recurrent layers at one point, immutable; it exists as a whole or not at all.

    Attributes:
        pages: one for each cache group.
        depth: tokens before it.
        digest: of these tokens.
        reason: why it was taken, see `retention`.
        hits: requests that resumed from it.
        stamp: time of its last use, in the units of the eviction queue.
        version: of its entry in the eviction queue.
    """

    __slots__ = ("depth", "digest", "hits", "pages", "reason", "stamp", "version")

    def __init__(self, pages: tuple[int, ...], depth: int, digest: bytes, reason: str) -> None:
        self.pages, self.depth, self.digest, self.reason = pages, depth, digest, reason
        self.hits, self.stamp, self.version = 0, 0.0, 0


class Node:
    """End of a hash unit.

    Attributes:
        digest: of all tokens before it.
        depth: how many they are.
        parent: one unit earlier; None at the first unit.
        page: holds the unit's tokens, and all earlier ones of this prefix that fall into the same page.
        checkpoint: the states here, or None.
    """

    __slots__ = ("checkpoint", "depth", "digest", "page", "parent")

    def __init__(self, digest: bytes, depth: int, parent: Node | None, page: int) -> None:
        self.digest, self.depth, self.parent, self.page = digest, depth, parent, page
        self.checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt is cached. `resume` is what a request may skip; the node is the handle that makes it true.

    Attributes:
        known: tokens whose pages are cached.
        resume: the deepest point not beyond `known` that has a checkpoint.
        limit: the deepest point that a hit may have: below the prompt's end, for one token must be computed.
        node: the node at `resume`; None if `resume` is 0.
    """

    known: int
    resume: int
    limit: int
    node: Node | None

    @property
    def junction(self) -> int:
        """Where a checkpoint is missing although the pages are there, the prefix being seen again; 0 = nowhere."""
        return self.known if self.known > self.resume else 0


class PrefixTrie:
    """All nodes, by digest and by page.

    Args:
        unit: tokens of a hash unit.
        stateful: whether resuming needs a checkpoint; a model without recurrent layers resumes at any node.

    Attributes:
        nodes: by digest.
        of_page: the nodes whose tokens a page holds, in order of depth.
    """

    def __init__(self, unit: int, stateful: bool) -> None:
        self.unit = unit
        self.stateful = stateful
        self.nodes: dict[bytes, Node] = {}
        self.of_page: dict[int, list[Node]] = {}
        self._children: dict[int, int] = {}  # nodes in other pages whose parents are in this one

    def match(self, digests: Sequence[bytes], tokens: int) -> Match:
        """One forward walk over the digests of a prompt with this many tokens; changes nothing. O(units that match)."""
        limit = max(0, tokens - 1) // self.unit
        find, last, resume = self.nodes.get, None, None
        for digest in digests[:limit]:
            node = find(digest)
            if node is None:
                break
            last = node
            if node.checkpoint is not None:
                resume = node
        if not self.stateful:
            resume = last
        return Match(
            known=last.depth if last else 0,
            resume=resume.depth if resume else 0,
            limit=limit * self.unit,
            node=resume,
        )

    def add(self, digest: bytes, depth: int, parent: Node | None, page: int) -> Node:
        """A new node whose tokens the page holds; its parent must be in the tree."""
        assert digest not in self.nodes, f"the prefix of {depth} tokens is in the tree already"
        node = self.nodes[digest] = Node(digest, depth, parent, page)
        self.of_page.setdefault(page, []).append(node)
        if parent is not None and parent.page != page:
            self._children[parent.page] = self._children.get(parent.page, 0) + 1
        return node

    def is_leaf(self, page: int) -> bool:
        """Whether no cached prefix in another page needs this page's tokens."""
        return not self._children.get(page)

    def remove(self, page: int) -> list[Node]:
        """Take all nodes of a leaf page out of the tree and return them."""
        assert self.is_leaf(page), f"page {page} holds the beginning of other cached prefixes"
        nodes = self.of_page.pop(page)
        for node in nodes:
            del self.nodes[node.digest]
            parent = node.parent
            if parent is not None and parent.page != page:
                left = self._children[parent.page] - 1
                if left:
                    self._children[parent.page] = left
                else:
                    del self._children[parent.page]
        return nodes

    def clear(self) -> None:
        """Forget all nodes."""
        self.nodes.clear()
        self.of_page.clear()
        self._children.clear()


def ancestors(node: Node | None) -> Iterator[Node]:
    """The node itself, then its parents up to the first unit."""
    while node is not None:
        yield node
        node = node.parent
