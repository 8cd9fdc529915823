"""What an admission takes: pages that it shares, pages of its own, and the operations that make these ready."""

from __future__ import annotations

from dataclasses import dataclass

from perilune.serve.cache.geometry import CacheGeometry
from perilune.serve.cache.plans import CopyPage, Operation, RestoreState, ZeroState
from perilune.serve.cache.trie import Match, Node, ancestors


@dataclass(frozen=True, slots=True)
class Hit:
    """Pages of a cached prefix.

    Attributes:
        table: the page of each range of tokens; the last one may be part-filled, and is copied rather than shared.
        held: all pages that nodes of the prefix name; more than the table has where requests entered it by turns.
        sources: pages of the checkpoint at its end.
    """

    table: list[int]
    held: set[int]
    sources: tuple[int, ...]


def hit_pages(node: Node | None, geometry: CacheGeometry) -> Hit:
    """The pages of the prefix that ends at a node.

    A range of the table is served by the *deepest* node in it: an earlier one may belong to another prefix's page, which
    holds only the beginning of this range.
    """
    if node is None:
        return Hit([], set(), ())
    size, table, held = geometry.page_tokens, {}, set()
    for earlier in ancestors(node):
        table.setdefault((earlier.depth - 1) // size, earlier.page)
        held.add(earlier.page)
    checkpoint = node.checkpoint
    return Hit([table[i] for i in range(len(table))], held, checkpoint.pages if checkpoint else ())


def own_pages(prompt: int, resume: int, geometry: CacheGeometry) -> int:
    """Pages for tokens to take for a prompt: those not shared, the copy of a part-filled one among them."""
    return geometry.pages_for(prompt) - resume // geometry.page_tokens


def start_operations(
    match: Match, sources: tuple[int, ...], own: list[int], state: tuple[int, ...], geometry: CacheGeometry
) -> tuple[Operation, ...]:
    """What makes a request's own pages ready: the copy of a part-filled page, and a restored or a zero state."""
    operations: list[Operation] = []
    left = match.resume % geometry.page_tokens
    if match.node is not None and left:
        operations.append(CopyPage(match.node.page, own[0], left))
    if state:
        operations.append(RestoreState(sources, state, match.resume) if sources else ZeroState(state))
    return tuple(operations)
