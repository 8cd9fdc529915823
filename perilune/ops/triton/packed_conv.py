"""`ops.packed_conv` on a CUDA device."""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.native.rows import parameter
from perilune.ops.triton.gates import sigmoid
from perilune.ops.triton.short_conv import CHANNELS, TOKENS, WARPS
from perilune.ops.triton.sizes import blocks

if TYPE_CHECKING:
    from perilune.ops.packed_conv import Chunks


@triton.jit(do_not_specialize=["T"])
def _convolve_kernel(
    x, x_token, weight, window, chunks, sinces, y, T, X, W: tl.constexpr, BT: tl.constexpr, BX: tl.constexpr
):
    t = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)[:, None]
    channel = (tl.program_id(0) * BX + tl.arange(0, BX))[None, :]
    mask = (t < T) & (channel < X)
    since = tl.load(sinces + t, t < T, W).to(tl.int32)
    total = tl.zeros([BT, BX], tl.float32)
    for j in tl.static_range(W):
        back = W - 1 - j
        v = tl.load(x + (t - back) * x_token + channel, mask & (since >= back), 0.0).to(tl.float32)
        total += tl.load(weight + channel * W + j, channel < X, 0.0) * v
    if tl.min(since) < W - 1:  # a chunk begins in this tile or just before it
        before = (tl.load(chunks + t, t < T, 0) * X + channel) * (W - 1)
        for j in tl.static_range(W - 1):
            back = W - 1 - j
            v = tl.load(window + before + (since + j), mask & (since < back), 0.0).to(tl.float32)
            total += tl.load(weight + channel * W + j, channel < X, 0.0) * v
    tl.store(y + t * X + channel, (total * sigmoid(total)).to(y.dtype.element_ty), mask)


@triton.jit
def _windows_kernel(x, x_token, window, begins, point_chunks, point_tokens, out, X, W: tl.constexpr, BX: tl.constexpr):
    point = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BX + tl.arange(0, BX)
    chunk, tokens = tl.load(point_chunks + point), tl.load(point_tokens + point)
    end = tl.load(begins + chunk) + tokens
    for j in tl.static_range(W - 1):
        back = W - 1 - j
        v = tl.load(x + (end - back) * x_token + channel, (channel < X) & (tokens >= back), 0.0)
        at = (chunk * X + channel) * (W - 1) + (tokens - back + W - 1)
        v += tl.load(window + at, (channel < X) & (tokens < back), 0.0)
        tl.store(out + (point * X + channel) * (W - 1) + j, v, channel < X)


def convolve(x_TX: Tensor, weight_XW: Tensor, window_NXw: Tensor, chunks: Chunks) -> Tensor:
    """y `[T, X]`."""
    tokens, width = x_TX.shape
    x, window = x_TX if x_TX.stride(1) == 1 else x_TX.contiguous(), window_NXw.contiguous()
    y = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    taps = weight_XW.shape[1]
    _convolve_kernel[(blocks(width, CHANNELS), blocks(tokens, TOKENS))](
        x, x.stride(0), parameter(weight_XW), window, chunks.chunk_T, chunks.since_T, y, tokens, width, W=taps, BT=TOKENS,
        BX=CHANNELS, num_warps=WARPS,
    )  # fmt: skip
    return y


def windows(x_TX: Tensor, window_NXw: Tensor, chunks: Chunks) -> Tensor:
    """Windows at all points, `[M, X, W-1]`."""
    x, window = x_TX if x_TX.stride(1) == 1 else x_TX.contiguous(), window_NXw.contiguous()
    out = torch.empty(len(chunks.points), *window.shape[1:], dtype=x.dtype, device=x.device)
    if chunks.points:
        _windows_kernel[(blocks(x.shape[1], CHANNELS), len(chunks.points))](
            x, x.stride(0), window, chunks.begin_N, chunks.point_chunk_M, chunks.point_tokens_M, out, x.shape[1],
            W=window.shape[2] + 1, BX=CHANNELS, num_warps=WARPS,
        )  # fmt: skip
    return out
