"""Sizes of the items of a batch: what the tower takes, and how many tokens come out."""

from __future__ import annotations

from torch import Tensor

from perilune.config import VisionConfig
from perilune.errors import RequestError

MAX_GRID_SIDE = 512
"""Largest side of a grid in patches (architecture §8.3)."""
Grid = tuple[int, int, int]
"""Frames, rows and columns of patches of one item."""


def checked_grids(grids: Tensor, vision: VisionConfig) -> list[Grid]:
    """The items' (frames, rows, columns) as numbers.

    Raises:
        RequestError: a grid that the tower cannot take; the message names the item and the limit.
    """
    items = [(int(t), int(h), int(w)) for t, h, w in grids.tolist()]
    for index, (t, h, w) in enumerate(items):
        if not 1 <= t <= vision.max_frames:
            raise RequestError(
                f"item {index} has {t} frames; this model takes 1 to {vision.max_frames} at once: cut a video into chunks"
            )
        if h % vision.merge or w % vision.merge or not (0 < h <= MAX_GRID_SIDE and 0 < w <= MAX_GRID_SIDE):
            raise RequestError(
                f"item {index} has a grid of {h} x {w} patches; sides must be multiples of {vision.merge} "
                f"in {vision.merge}..{MAX_GRID_SIDE}: resize and pad it with ImageProcessor"
            )
    return items


def item_tokens(grid: Grid, merge: int) -> int:
    """Tokens that an item becomes: (h/m)(w/m), however many frames it has."""
    return (grid[1] // merge) * (grid[2] // merge)
