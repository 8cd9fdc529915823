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
        reason: why it is kept, see `retention`.
        claims: requests that passed here and will supersede it, if it is one that is recycled.
        hits: requests that resumed from it.
        stamp: time of its last use, in the units of the eviction queue.
        version: of its entry in the eviction queue.
    """

    __slots__ = ("claims", "depth", "digest", "hits", "pages", "reason", "stamp", "version")

    def __init__(self, pages: tuple[int, ...], depth: int, digest: bytes, reason: str) -> None:
        self.pages, self.depth, self.digest, self.reason = pages, depth, digest, reason
        self.claims, self.hits, self.stamp, self.version = 0, 0, 0.0, 0


class Node:
    """End of a hash unit.

    Attributes:
        digest: of all tokens before it.
        depth: how many they are.
        parent: one unit earlier; None at the first unit.
        page: holds the unit's tokens, and all earlier ones of this prefix that fall into the same page.
        checkpoint: the states here, or None.
        children: nodes one unit deeper.
        users: running requests and pins whose prefix ends here.
        version: of its entry in the eviction queue.
    """

    __slots__ = ("checkpoint", "children", "depth", "digest", "page", "parent", "users", "version")

    def __init__(self, digest: bytes, depth: int, parent: Node | None, page: int) -> None:
        self.digest, self.depth, self.parent, self.page = digest, depth, parent, page
        self.checkpoint: Checkpoint | None = None
        self.children = self.users = self.version = 0

    @property
    def is_loose(self) -> bool:
        """Whether nothing hangs on it: no deeper prefix, no request, no pin."""
        return not self.children and not self.users


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
        if parent is not None:
            parent.children += 1
        return node

    def run(self, node: Node) -> list[Node]:
        """A loose node, and its ancestors in the same page that only it keeps: what can go at once, deepest first."""
        assert node.is_loose, f"the prefix of {node.depth} tokens is in use"
        nodes, parent = [node], node.parent
        while parent is not None and parent.page == node.page and parent.children == 1 and not parent.users:
            nodes.append(parent)
            parent = parent.parent
        return nodes

    def remove(self, nodes: Sequence[Node]) -> None:
        """Take a run out of the tree."""
        page = nodes[0].page
        gone = set(nodes)
        left = [node for node in self.of_page[page] if node not in gone]
        if left:
            self.of_page[page] = left
        else:
            del self.of_page[page]
        for node in nodes:
            del self.nodes[node.digest]
        parent = nodes[-1].parent
        if parent is not None:
            parent.children -= 1

    def clear(self) -> None:
        """Forget all nodes."""
        self.nodes.clear()
        self.of_page.clear()


def ancestors(node: Node | None) -> Iterator[Node]:
    """The node itself, then its parents up to the first unit."""
    while node is not None:
        yield node
        node = node.parent
