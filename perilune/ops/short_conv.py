"""Causal depthwise convolution of a few taps, then SiLU: what q, k and v of KDA pass through (report §2.1.1).

    y_t = silu( sum_j w[:, j] * x_{t-W+1+j} ),   j = 0..W-1, no bias

Before a document's first token the inputs are zero. A call may start in mid-sequence: `window` holds the W-1 raw inputs
before it, and the W-1 last ones are returned, so any split of a sequence into calls gives the result of one call.
Float32 inside (float64 for float64 inputs); hand-written backward that saves the inputs only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.errors import ConfigError
from perilune.ops.choice import Choice
from perilune.ops.native.rows import choose, entry, fresh, parameter, threads_for
from perilune.ops.segments import Segments
from perilune.ops.triton.available import choose as choose_triton

MAX_NATIVE_TAPS = 16
MAX_TRITON_TAPS = 8  # inputs and gradients of so many tokens stay in registers
TIME_BLOCK = 256  # tokens one native task handles; fixes the order in which the weight's gradient is summed


def select(x_BTX: Tensor, weight_XW: Tensor) -> Choice:
    """Say which implementation the short convolution uses, and why."""
    choice = choose_triton(x_BTX) or choose("elementwise", x_BTX)
    if choice.implementation == "triton" and weight_XW.shape[-1] > MAX_TRITON_TAPS:
        return Choice("torch", f"the Triton kernels take at most {MAX_TRITON_TAPS} taps, not {weight_XW.shape[-1]}")
    if choice.implementation == "native" and weight_XW.shape[-1] > MAX_NATIVE_TAPS:
        return Choice("torch", f"the native kernel takes at most {MAX_NATIVE_TAPS} taps, not {weight_XW.shape[-1]}")
    return choice


def short_conv(
    x_BTX: Tensor, weight_XW: Tensor, window_BXW1: Tensor | None = None, segments: Segments | None = None
) -> tuple[Tensor, Tensor]:
    """Convolve and apply SiLU.

    Args:
        x_BTX: [B, T, X] raw projections.
        weight_XW: [X, W] taps, oldest first.
        window_BXW1: [B, X, W-1] inputs before the first token, oldest first; None = zeros (a sequence starts here).
        segments: documents packed in the rows; taps never reach before a document's start.

    Returns:
        y [B, T, X] in x's dtype, and the new window [B, X, W-1]: the last W-1 raw inputs of the last document of each
        row (zeros where that document is shorter). Gradients flow through both, and into the given window.

    Raises:
        ConfigError: shapes disagree, or both a window and segments are given.
    """
    _check(x_BTX, weight_XW, window_BXW1, segments)
    implementation = select(x_BTX, weight_XW).implementation
    if implementation == "reference":
        return short_conv_reference(x_BTX, weight_XW, window_BXW1, segments)
    if window_BXW1 is not None:
        window_BXW1 = window_BXW1.to(x_BTX.dtype)
    inputs = (x_BTX, weight_XW, window_BXW1)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        return _ShortConv.apply(*inputs, segments, implementation)
    if implementation == "native" and x_BTX.shape[1] == 1 and window_BXW1 is not None:
        return _native_step(*inputs)
    y_BTX = _steps(implementation)[0](*inputs, segments)
    return y_BTX, _next_window(x_BTX, window_BXW1, segments, weight_XW.shape[1])


def short_conv_reference(
    x_BTX: Tensor, weight_XW: Tensor, window_BXW1: Tensor | None = None, segments: Segments | None = None
) -> tuple[Tensor, Tensor]:
    """The formula of `short_conv`, one tap after another, differentiated by autograd."""
    batch, length, width = x_BTX.shape
    taps = weight_XW.shape[1]
    exact = torch.promote_types(x_BTX.dtype, torch.float32)
    if window_BXW1 is None:
        window_BXW1 = x_BTX.new_zeros(batch, width, taps - 1)
    padded = torch.cat([window_BXW1.to(x_BTX.dtype).transpose(1, 2), x_BTX], dim=1)
    pre_BTX = torch.zeros_like(x_BTX, dtype=exact)
    for tap in range(taps):
        seen = padded[:, tap : tap + length].to(exact)
        if segments is not None:
            seen = seen * (segments.offset_BT >= taps - 1 - tap)[..., None]
        pre_BTX = pre_BTX + weight_XW[:, tap].to(exact) * seen
    return F.silu(pre_BTX).to(x_BTX.dtype), _next_window(x_BTX, window_BXW1, segments, taps)


def _check(x_BTX: Tensor, weight_XW: Tensor, window_BXW1: Tensor | None, segments: Segments | None) -> None:
    if x_BTX.dim() != 3 or weight_XW.dim() != 2 or weight_XW.shape[0] != x_BTX.shape[2]:
        raise ConfigError(
            f"short_conv got x {list(x_BTX.shape)} and weight {list(weight_XW.shape)}; it needs [B, T, X] and [X, W] with one X"
        )
    if window_BXW1 is None:
        return
    if segments is not None:
        raise ConfigError(
            "short_conv got both a window and segments; a packed row starts afresh, so leave the window out"
        )
    wanted = (x_BTX.shape[0], x_BTX.shape[2], weight_XW.shape[1] - 1)
    if window_BXW1.shape != wanted:
        raise ConfigError(f"short_conv got a window {list(window_BXW1.shape)}; x and weight need {list(wanted)}")


def _next_window(x_BTX: Tensor, window_BXW1: Tensor | None, segments: Segments | None, taps: int) -> Tensor:
    """The W-1 last raw inputs as [B, X, W-1], in memory of its own."""
    kept = taps - 1
    length = x_BTX.shape[1]
    last_BXW1 = x_BTX[:, max(0, length - kept) :].transpose(1, 2)
    if segments is not None:
        offset_BT = segments.offset_BT[:, max(0, length - kept) :]
        behind = offset_BT.shape[1] - 1 - torch.arange(offset_BT.shape[1], device=x_BTX.device)
        last_BXW1 = last_BXW1 * (behind <= offset_BT[:, -1:])[:, None]
    if length < kept:
        if window_BXW1 is None:
            window_BXW1 = x_BTX.new_zeros(x_BTX.shape[0], x_BTX.shape[2], kept)
        return torch.cat([window_BXW1[:, :, length:], last_BXW1], dim=2)
    return last_BXW1.clone(memory_format=torch.contiguous_format)


def _steps(implementation: str) -> tuple[Callable[..., Tensor], Callable[..., tuple]]:
    """The implementation's forward and backward functions."""
    if implementation == "triton":
        from perilune.ops.triton.short_conv import backward, forward

        return forward, backward
    return (_native_forward, _native_backward) if implementation == "native" else (_torch_forward, _torch_backward)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BTX, weight_XW, window_BXW1, segments, implementation):
        ctx.save_for_backward(x_BTX, weight_XW, window_BXW1)
        ctx.segments, ctx.implementation = segments, implementation
        ctx.set_materialize_grads(False)
        y_BTX = _steps(implementation)[0](x_BTX, weight_XW, window_BXW1, segments)
        return y_BTX, _next_window(x_BTX, window_BXW1, segments, weight_XW.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_BTX, dnext_BXW1):
        x_BTX, weight_XW, window_BXW1 = ctx.saved_tensors
        if dy_BTX is None:
            dy_BTX = torch.zeros_like(x_BTX)
        step = _steps(ctx.implementation)[1]
        dx_BTX, dweight_XW, dwindow_BXW1 = step(x_BTX, weight_XW, window_BXW1, ctx.segments, dy_BTX)
        if dnext_BXW1 is not None:
            with torch.enable_grad():
                x = x_BTX.detach().requires_grad_()
                window = torch.zeros_like(dnext_BXW1) if window_BXW1 is None else window_BXW1.detach()
                following = _next_window(x, window.requires_grad_(), ctx.segments, weight_XW.shape[1])
            extra_x, extra_window = torch.autograd.grad(following, (x, window), dnext_BXW1, allow_unused=True)
            dx_BTX = dx_BTX if extra_x is None else dx_BTX + extra_x
            if dwindow_BXW1 is not None and extra_window is not None:
                dwindow_BXW1 = dwindow_BXW1 + extra_window
        return dx_BTX, dweight_XW, dwindow_BXW1, None, None


def _padded(x_BTX, window_BXW1, taps, exact):
    """[B, W-1+T, X]: the window or zeros, then x."""
    if window_BXW1 is None:
        return F.pad(x_BTX.to(exact), (0, 0, taps - 1, 0))
    return torch.cat([window_BXW1.transpose(1, 2).to(exact), x_BTX.to(exact)], dim=1)


def _pre_activation(padded, weight_XW, segments, length):
    """The sum over taps [B, T, X], and for each tap the mask [B, T, 1] of tokens it may be added to (None: all)."""
    taps = weight_XW.shape[1]
    masks = [None if segments is None else (segments.offset_BT >= taps - 1 - tap)[..., None] for tap in range(taps)]
    weight_WX = weight_XW.t().to(padded.dtype)
    pre_BTX = padded[:, taps - 1 :] * weight_WX[-1]
    for tap in range(taps - 1):
        seen = padded[:, tap : tap + length]
        pre_BTX = torch.addcmul(pre_BTX, seen if masks[tap] is None else seen * masks[tap], weight_WX[tap])
    return pre_BTX, masks


def _torch_forward(x_BTX, weight_XW, window_BXW1, segments):
    exact = torch.promote_types(x_BTX.dtype, torch.float32)
    padded = _padded(x_BTX, window_BXW1, weight_XW.shape[1], exact)
    return F.silu(_pre_activation(padded, weight_XW, segments, x_BTX.shape[1])[0]).to(x_BTX.dtype)


def _torch_backward(x_BTX, weight_XW, window_BXW1, segments, dy_BTX):
    exact = torch.promote_types(x_BTX.dtype, torch.float32)
    taps, length = weight_XW.shape[1], x_BTX.shape[1]
    padded = _padded(x_BTX, window_BXW1, taps, exact)
    pre_BTX, masks = _pre_activation(padded, weight_XW, segments, length)
    opened = torch.sigmoid(pre_BTX)
    dpre_BTX = dy_BTX.to(exact) * (opened * (1 + pre_BTX * (1 - opened)))
    dpadded, dweight_XW = torch.zeros_like(padded), torch.empty_like(weight_XW, dtype=exact)
    for tap, mask in enumerate(masks):
        reached = dpre_BTX if mask is None else dpre_BTX * mask
        dpadded[:, tap : tap + length].addcmul_(reached, weight_XW[:, tap].to(exact))
        dweight_XW[:, tap] = (reached * padded[:, tap : tap + length]).sum((0, 1))
    dwindow = None if window_BXW1 is None else dpadded[:, : taps - 1].transpose(1, 2).to(window_BXW1.dtype).contiguous()
    return dpadded[:, taps - 1 :].to(x_BTX.dtype), dweight_XW.to(weight_XW.dtype), dwindow


def _with_unit_stride(x_BTX: Tensor) -> Tensor:
    return x_BTX if x_BTX.stride(2) == 1 or x_BTX.shape[2] == 1 else x_BTX.contiguous()


def _first_token(segments: Segments | None, length: int) -> Tensor | None:
    """[B, T]: index within its row of the first token of each token's document."""
    if segments is None:
        return None
    return (torch.arange(length) - segments.offset_BT).contiguous()


def _native_inputs(x_BTX, weight_XW, window_BXW1, segments):
    """Tensors in the layout the kernels read: unit-stride channels, taps and window rows as [W, X]."""
    weight_WX = weight_XW.detach().t().to(torch.float32).contiguous()
    rows = None if window_BXW1 is None else window_BXW1.transpose(1, 2).contiguous()
    zeros_X = torch.zeros(x_BTX.shape[2], dtype=x_BTX.dtype)
    return _with_unit_stride(x_BTX), weight_WX, rows, _first_token(segments, x_BTX.shape[1]), zeros_X


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _native_forward(x_BTX, weight_XW, window_BXW1, segments):
    batch, length, width = x_BTX.shape
    x, weight, window, first, zeros = _native_inputs(x_BTX, weight_XW, window_BXW1, segments)
    y_BTX = fresh(x_BTX)
    entry("elementwise", "conv_forward", x.dtype, "pllppppplllili")(
        x.data_ptr(), x.stride(0), x.stride(1), weight.data_ptr(), _pointer(window), _pointer(first), zeros.data_ptr(),
        y_BTX.data_ptr(), batch, length, width, weight_XW.shape[1], TIME_BLOCK, threads_for(x.numel()))  # fmt: skip
    return y_BTX


def _native_backward(x_BTX, weight_XW, window_BXW1, segments, dy_BTX):
    batch, length, width = x_BTX.shape
    taps = weight_XW.shape[1]
    x, weight, window, first, zeros = _native_inputs(x_BTX, weight_XW, window_BXW1, segments)
    dy = _with_unit_stride(dy_BTX)
    dx_BTX = fresh(x_BTX)
    dwindow = None if window is None else torch.zeros_like(window)
    partial = torch.empty(batch * -(-length // TIME_BLOCK), taps, width)
    dweight_WX = torch.empty(taps, width)
    entry("elementwise", "conv_backward", x.dtype, "pllpppppllpppplllili")(
        x.data_ptr(), x.stride(0), x.stride(1), weight.data_ptr(), _pointer(window), _pointer(first), zeros.data_ptr(),
        dy.data_ptr(), dy.stride(0), dy.stride(1), dx_BTX.data_ptr(), _pointer(dwindow), partial.data_ptr(),
        dweight_WX.data_ptr(), batch, length, width, taps, TIME_BLOCK, threads_for(x.numel()))  # fmt: skip
    dwindow_BXW1 = None if dwindow is None else dwindow.transpose(1, 2).contiguous()
    return dx_BTX, dweight_WX.t().to(weight_XW.dtype).contiguous(), dwindow_BXW1


def _native_step(x_BTX, weight_XW, window_BXW1):
    batch, _, width = x_BTX.shape
    x, window, weight = _with_unit_stride(x_BTX), window_BXW1.contiguous(), parameter(weight_XW)
    y_BTX, new_window = fresh(x_BTX), torch.empty_like(window)
    entry("elementwise", "conv_step", x.dtype, "plppppllii")(
        x.data_ptr(), x.stride(0), weight.data_ptr(), window.data_ptr(), y_BTX.data_ptr(), new_window.data_ptr(), batch,
        width, weight_XW.shape[1], threads_for(x.numel()))  # fmt: skip
    return y_BTX, new_window
