"""Absorbed attention as a CUDA kernel whose products have the rows as columns: for which calls, and its launch. See columns.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from torch import Tensor

from perilune.ops.cuda import Kernel
from perilune.ops.cuda.tile_map import WORDS, tile_map

COLUMNS = 48  # of a tile: new tokens x heads
KEYS = 64  # cached tokens of a block
CHUNK_BYTES = 8192  # of 64 cached rows of 64 channels


@cache
def kernel(extra: int, sharers: int) -> Kernel:
    """The kernel for a cache with shared channels, of which there are 64, or without (`extra` = 0), whose blocks share each
    cached row by `sharers`."""
    chunks = 8 + bool(extra)
    floats = (2 + 4 + 8) * COLUMNS
    return Kernel(
        Path(__file__).parent / "columns.cu",
        "columns",
        "P" * 7 + "q" * 4 + "iiiiif" + "q" * 2 * WORDS,
        threads=384,
        shared_bytes=2 * CHUNK_BYTES * chunks
        + 128 * COLUMNS * (chunks + 2)
        + 4 * floats
        + 8
        + 8 * 4 * (2 + bool(extra)),
        defines={"EXTRA": 64 * bool(extra), "SHARERS": sharers},
    )


def tiles(count: int) -> int:
    """Blocks for `count` rows of a sequence."""
    return -(-count // COLUMNS)


def kernel_for(count: int, extra: int) -> Kernel:
    """The kernel for `count` rows of a sequence: an even number of tiles is shared by pairs."""
    return kernel(extra, 1 if tiles(count) % 2 else 2)


def attend(
    query_BQL: Tensor, query_shared_BTHr: Tensor, latent_BSL: Tensor, shared_BSr: Tensor, factor: float, length_B: Tensor | None,
    table_BP: Tensor | None, out_BQL: Tensor, sums: Tensor, logs: Tensor,
) -> None:  # fmt: skip
    """As `decode.attend`."""
    batch, tokens, heads, extra = query_shared_BTHr.shape
    cached = latent_BSL.shape[1] * (1 if table_BP is None else table_BP.shape[1])
    form = kernel_for(tokens * heads, extra)
    rows = KEYS // form.defines["SHARERS"]
    maps = (*tile_map(latent_BSL, rows), *(tile_map(shared_BSr, rows) if extra else [0] * WORDS))
    form.launch(
        (tiles(tokens * heads), logs.shape[0]), query_BQL, query_shared_BTHr, length_B, table_BP, out_BQL, sums, logs,
        *query_shared_BTHr.stride()[:3], 0 if table_BP is None else table_BP.stride(0), latent_BSL.shape[1] // KEYS, cached,
        batch, tokens, heads, factor, *maps,
    )  # fmt: skip
