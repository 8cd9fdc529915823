"""Sizes of the tiles, by element type and rows an expert."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """Of one product: output columns of a tile, depth of a step, steps in flight, warps of a program, and programs a
    multiprocessor that take tile after tile; 0 = a program for each tile, of which as many run as there is room for."""

    columns: int
    depth: int
    stages: int
    warps: int
    programs: int = 1


class Config(NamedTuple):
    """Of the chain: rows of a tile, and the tiles of each product.

    Attributes:
        rows: rows of every tile of routed rows.
        glu: the two products before the gated unit; `columns` of each of the two.
        product: rows times one matrix.
        weights: of a weight's gradient; `columns` of it, and `weight_rows` rows.
        weight_rows: see `weights`.
        group: tiles of rows that take turns with one tile of columns.
    """

    rows: int
    glu: Tiles
    product: Tiles
    weights: Tiles
    weight_rows: int
    group: int = 8


MANY = 80  # routed rows an expert from which 128 rows a tile waste less than they gain: they win at 96 and above

# What a multiprocessor has bounds them: 227 KiB of shared memory for the steps in flight and the tile that is written, and
# 65536 registers. Several small programs hide each other's ends; large tiles read less.
HALF = {
    128: Config(128, Tiles(128, 64, 4, 8), Tiles(256, 64, 3, 8), Tiles(128, 64, 3, 4, 0), 128),
    64: Config(64, Tiles(64, 64, 4, 4, 2), Tiles(128, 64, 3, 4, 2), Tiles(128, 64, 3, 4, 0), 64),
}
FULL = Config(64, Tiles(32, 32, 2, 4, 4), Tiles(64, 32, 2, 4, 4), Tiles(64, 32, 2, 4, 4), 64)


def config(dtype: torch.dtype, slots: int, experts: int) -> Config:
    """The tiles for `slots` routed rows over `experts`."""
    if dtype == torch.float32:
        return FULL
    return HALF[128 if slots >= MANY * experts else 64]
