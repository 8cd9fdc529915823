"""The short causal convolution with SiLU on a CUDA device, forward and backward.

Forward: a tile of tokens and channels reads its input once for each tap, all but one of the reads out of the cache.
Backward: a program walks through runs of RUN tokens, a few runs side by side, with the last W inputs and the last W
unfinished gradients in registers; so each input is read once (but for the W - 1 tokens before and behind a run) and the
slope of SiLU is taken once. The weight's gradient is one partial sum a program, added in a fixed order.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.native.rows import fresh, parameter
from perilune.ops.segments import Segments
from perilune.ops.triton.gates import sigmoid
from perilune.ops.triton.sizes import blocks

TOKENS, CHANNELS = 16, 256  # tile of the forward kernel; with those below the fastest measured on one H200
RUN, RUNS, TOGETHER = 64, 2, 4  # of the backward kernel: it fetches the inputs of TOGETHER tokens before it uses them
WARPS = 4


@triton.jit
def _input(x, x_token, window, t, channel, mask, X, W: tl.constexpr):
    """Inputs at tokens t: x [T, X], before its start the window [X, W-1], or zeros."""
    v = tl.load(x + t * x_token + channel, mask & (t >= 0), 0.0).to(tl.float32)
    if window is not None:
        v += tl.load(window + channel * (W - 1) + (t + W - 1), mask & (t < 0) & (t >= 1 - W), 0.0).to(tl.float32)
    return v


@triton.jit
def _forward_kernel(
    x, x_batch, x_token, weight, window, offset, y, T, X, W: tl.constexpr, BT: tl.constexpr, BX: tl.constexpr
):
    batch = tl.program_id(2).to(tl.int64)
    t = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)[:, None]
    channel = (tl.program_id(0) * BX + tl.arange(0, BX))[None, :]
    mask = (t < T) & (channel < X)
    x += batch * x_batch
    if window is not None:
        window += batch * X * (W - 1)
    if offset is not None:
        since = tl.load(offset + batch * T + t, t < T, 0)
    total = tl.zeros([BT, BX], tl.float32)
    for j in tl.static_range(W):
        seen = mask
        if offset is not None:
            seen = mask & (since >= W - 1 - j)
        v = _input(x, x_token, window, t - (W - 1 - j), channel, seen, X, W)
        total += tl.load(weight + channel * W + j, channel < X, 0.0) * v
    tl.store(y + (batch * T + t) * X + channel, (total * sigmoid(total)).to(y.dtype.element_ty), mask)


@triton.jit
def _backward_kernel(
    x, x_batch, x_token, weight, window, offset, dy, dy_batch, dy_token, dx, dwindow, dweight, T, X, W: tl.constexpr,
    RUN: tl.constexpr, RUNS: tl.constexpr, BX: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    begin = ((tl.program_id(1) * RUNS + tl.arange(0, RUNS)) * RUN).to(tl.int64)[:, None]
    channel = (tl.program_id(0) * BX + tl.arange(0, BX))[None, :]
    here = channel < X
    x += batch * x_batch
    dy += batch * dy_batch
    dx += batch * T * X
    if window is not None:
        window += batch * X * (W - 1)
        dwindow += batch * X * (W - 1)
    taps, past, open, dw = (), (), (), ()
    for j in tl.static_range(W):
        taps = taps + (tl.load(weight + channel * W + j, here, 0.0),)
        dw = dw + (tl.zeros([RUNS, BX], tl.float32),)
    for j in tl.static_range(W - 1):  # oldest first
        past = past + (_input(x, x_token, window, begin - (W - 1 - j), channel, here & (begin < T), X, W),)
        open = open + (tl.zeros([RUNS, BX], tl.float32),)
    for first in range(0, RUN + W - 1, TOGETHER):
        inputs, slopes = (), ()
        for i in tl.static_range(TOGETHER):
            t = begin + first + i
            alive = here & (t < T)
            inputs = inputs + (tl.load(x + t * x_token + channel, alive, 0.0),)
            slopes = slopes + (tl.load(dy + t * dy_token + channel, alive, 0.0),)
        for i in tl.static_range(TOGETHER):
            t = begin + first + i
            seen = past + (inputs[i].to(tl.float32),)
            visible = seen
            if offset is not None:
                since = tl.load(offset + batch * T + t, t < T, 0)
                visible = ()
                for j in tl.static_range(W):
                    visible = visible + (tl.where(since >= W - 1 - j, seen[j], 0.0),)
            total = tl.zeros([RUNS, BX], tl.float32)
            for j in tl.static_range(W):
                total += taps[j] * visible[j]
            opened = sigmoid(total)
            dpre = slopes[i].to(tl.float32) * (opened * (1.0 + total * (1.0 - opened)))
            reach, sums = (), ()
            for j in tl.static_range(W):
                sums = sums + (dw[j] + tl.where(first + i < RUN, dpre * visible[j], 0.0),)
                part = taps[j] * dpre
                if offset is not None:
                    part = tl.where(since >= W - 1 - j, part, 0.0)
                if j < W - 1:
                    part += open[j]
                reach = reach + (part,)
            done = t - (W - 1)
            own = here & (done >= begin) & (done < begin + RUN) & (done < T)
            tl.store(dx + done * X + channel, reach[0].to(dx.dtype.element_ty), own)
            if dwindow is not None:
                before = here & (done < 0) & (done >= 1 - W)
                tl.store(dwindow + channel * (W - 1) + (done + W - 1), reach[0].to(dwindow.dtype.element_ty), before)
            past, open, dw = seen[1:], reach[1:], sums
    block = batch * tl.num_programs(1) + tl.program_id(1)
    for j in tl.static_range(W):
        tl.store(dweight + (block * W + j) * X + channel, tl.sum(dw[j], 0)[None, :], here)


def forward(x_BTX: Tensor, weight_XW: Tensor, window_BXW1: Tensor | None, segments: Segments | None) -> Tensor:
    """Launch the forward kernel: y [B, T, X] in x's dtype."""
    batch, length, width = x_BTX.shape
    y_BTX = fresh(x_BTX)
    if y_BTX.numel():
        x, window, offset = _inputs(x_BTX, window_BXW1, segments)
        _forward_kernel[(blocks(width, CHANNELS), blocks(length, TOKENS), batch)](
            x, x.stride(0), x.stride(1), parameter(weight_XW), window, offset, y_BTX, length, width,
            W=weight_XW.shape[1], BT=TOKENS, BX=CHANNELS, num_warps=WARPS,
        )  # fmt: skip
    return y_BTX


def backward(
    x_BTX: Tensor, weight_XW: Tensor, window_BXW1: Tensor | None, segments: Segments | None, dy_BTX: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch the backward kernel. Returns the gradients of x, the weight and the window."""
    batch, length, width = x_BTX.shape
    taps = weight_XW.shape[1]
    dx_BTX = fresh(x_BTX)
    dwindow = None if window_BXW1 is None else torch.zeros_like(window_BXW1, memory_format=torch.contiguous_format)
    groups = blocks(length, RUN * RUNS)
    dweight = torch.empty(batch * groups, taps, width, device=x_BTX.device)
    if dx_BTX.numel():
        x, window, offset = _inputs(x_BTX, window_BXW1, segments)
        dy = dy_BTX if dy_BTX.stride(2) == 1 else dy_BTX.contiguous()
        _backward_kernel[(blocks(width, CHANNELS), groups, batch)](
            x, x.stride(0), x.stride(1), parameter(weight_XW), window, offset, dy, dy.stride(0), dy.stride(1), dx_BTX,
            dwindow, dweight, length, width, W=taps, RUN=RUN, RUNS=RUNS, BX=CHANNELS, TOGETHER=TOGETHER, num_warps=WARPS,
        )  # fmt: skip
    return dx_BTX, dweight.sum(0).t().to(weight_XW.dtype).contiguous(), dwindow


def _inputs(
    x_BTX: Tensor, window_BXW1: Tensor | None, segments: Segments | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x = x_BTX if x_BTX.stride(2) == 1 else x_BTX.contiguous()
    window = None if window_BXW1 is None else window_BXW1.contiguous()
    return x, window, None if segments is None else segments.offset_BT.contiguous()
