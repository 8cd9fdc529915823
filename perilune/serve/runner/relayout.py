"""Moving a prefix between engines whose ranks are of another number: which bytes go where is `cache.layout`'s plan.

A head's state is one run of bytes, so no rank rearranges anything: runs are copied as they are, each once.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from perilune.serve.cache.geometry import CacheGeometry
from perilune.serve.cache.layout import Extent, Move, state_moves, token_moves


def _run(pages: Tensor, extent: Extent) -> Tensor:
    return pages[extent.page, extent.offset : extent.offset + extent.length]


def _apply(moves: Sequence[Move], source: Sequence[Tensor], target: Sequence[Tensor]) -> int:
    moved = 0
    for move in moves:
        _run(target[move.target_rank], move.target).copy_(_run(source[move.source_rank], move.source))
        moved += move.source.length
    return moved


def move_state(
    source: Sequence[Tensor], source_geometry: CacheGeometry, target: Sequence[Tensor], target_geometry: CacheGeometry
) -> int:
    """Copy a checkpoint from the ranks of one engine to those of another; returns the bytes moved.

    Args:
        source: of each rank of the sender the pages of the checkpoint, uint8 `[groups, page_bytes]`.
        target: of each rank of the receiver where to.

    Raises:
        ConfigError: the two do not cache the same model in the same formats.
    """
    return _apply(list(state_moves(source_geometry, target_geometry)), source, target)


def move_tokens(
    source: Sequence[Tensor],
    source_geometry: CacheGeometry,
    target: Sequence[Tensor],
    target_geometry: CacheGeometry,
    start: int,
    end: int,
) -> int:
    """Copy the cached tokens from `start` to `end` to every rank of another engine; returns the bytes moved.

    Args:
        source: of each rank of the sender the pages of the sequence in order, uint8 `[pages, page_bytes]`.
        target: of each rank of the receiver where to.
        start, end: tokens of the sequence.

    Raises:
        ConfigError: see `move_state`.
    """
    return _apply(list(token_moves(source_geometry, target_geometry, start, end)), source, target)
