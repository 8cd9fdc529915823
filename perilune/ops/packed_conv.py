"""The short convolution of chunks of several sequences, one behind the other, each of which goes on where it stopped.

    y_t = silu( sum_j w[:, j] * x_{t-W+1+j} )

where an input before a chunk's first token is taken from that chunk's window, its W-1 inputs before. So a chunk gives what
`short_conv` gives for it alone. No gradient: this is what a server prefills with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.ops.choice import Choice
from perilune.ops.short_conv import short_conv
from perilune.ops.triton.available import choose as choose_triton


@dataclass(frozen=True)
class Chunks:
    """Where chunks lie in a row of T tokens, and points in them at which windows are wanted.

    Attributes:
        offsets: N+1 boundaries, on the host.
        points: pairs of a chunk and a number of its tokens, on the host: the window behind those is wanted.
        chunk_T: int64 `[T]`, the chunk of each token.
        since_T: int64 `[T]`, tokens of its chunk before it.
        begin_N: int64 `[N]`, first token of each chunk.
        point_chunk_M, point_tokens_M: int64 `[M]`, the points.
    """

    offsets: tuple[int, ...]
    points: tuple[tuple[int, int], ...]
    chunk_T: Tensor
    since_T: Tensor
    begin_N: Tensor
    point_chunk_M: Tensor
    point_tokens_M: Tensor

    @staticmethod
    def of(lengths: Sequence[int], points: Sequence[tuple[int, int]], upload: Callable[[Tensor], Tensor]) -> Chunks:
        """From the lengths of the chunks; `upload` brings a tensor to the device."""
        sizes = torch.tensor(lengths)
        ends = sizes.cumsum(0)
        chunk_T = torch.arange(len(lengths)).repeat_interleave(sizes)
        begin_N = ends - sizes
        since_T = torch.arange(len(chunk_T)) - begin_N[chunk_T]
        numbers = torch.tensor(list(points), dtype=torch.int64).reshape(-1, 2).T.contiguous()
        tensors = (chunk_T, since_T, begin_N, *numbers)
        there = upload(torch.cat(tensors)).split([len(x) for x in tensors])
        return Chunks((0, *ends.tolist()), tuple(points), *there)


def select(x_TX: Tensor, weight_XW: Tensor) -> Choice:
    """Say which implementation runs for these operands, and why."""
    choice = choose_triton(x_TX)
    if choice is not None and choice.implementation == "triton":
        return Choice("triton", "one kernel for all chunks, one for all windows")
    return Choice("torch", "`short_conv` of each chunk")


def packed_conv(x_TX: Tensor, weight_XW: Tensor, window_NXw: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Convolve and apply SiLU.

    Args:
        x_TX: `[T, X]` raw projections.
        weight_XW: `[X, W]` taps, oldest first.
        window_NXw: `[N, X, W-1]` inputs before each chunk, oldest first.
        chunks: where they lie.

    Returns:
        y `[T, X]` in x's dtype, and the windows at all points `[M, X, W-1]`: the last W-1 inputs there, oldest first.
    """
    window_NXw = window_NXw.to(x_TX.dtype)
    if select(x_TX, weight_XW).implementation == "triton":
        from perilune.ops.triton.packed_conv import convolve, windows

        return convolve(x_TX, weight_XW, window_NXw, chunks), windows(x_TX, window_NXw, chunks)
    lengths = [end - begin for begin, end in zip(chunks.offsets, chunks.offsets[1:])]
    parts = x_TX.split(lengths)
    y = [short_conv(part[None], weight_XW, window[None])[0][0] for part, window in zip(parts, window_NXw)]
    taps = window_NXw.shape[2]
    found = [
        torch.cat((window_NXw[n], parts[n][max(0, tokens - taps) : tokens].mT), 1)[:, -taps:] for n, tokens in chunks.points
    ]  # fmt: skip
    return torch.cat(y), torch.stack(found) if found else window_NXw[:0]
