"""Sizes of tiles and grids."""

from __future__ import annotations


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`, 1 for 0: what a tile's axis must be."""
    return 1 << max(0, number - 1).bit_length()


def blocks(number: int, size: int) -> int:
    """How many blocks of `size` cover `number`."""
    return -(-number // size)
