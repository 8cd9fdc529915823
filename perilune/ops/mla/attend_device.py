"""Causal attention on a CUDA device, differentiable: by the CUDA kernels where they take the call, else by Triton's.

What the libraries' kernels lack for training: the output is stored as the accumulator holds it, in fp32 where asked
(report §2.1.2), and the backward pass takes <do, o> from that; a packed document costs what it costs alone; the largest logit of
each head comes with it; lengths stay on the device, and gradients repeat bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.mla.cuda import attend as cuda
from perilune.ops.mla.cuda import attend_backward as cuda_backward
from perilune.ops.mla.device import LOG2E
from perilune.ops.mla.documents import Layout
from perilune.ops.mla.max_logit import max_logit
from perilune.ops.segments import Segments
from perilune.ops.triton.sizes import blocks


def rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors `[B, T, H, D]` whose last axis is dense."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def attend(
    q_BTHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, scale: float, segments: Segments | None, past: int, out_dtype: torch.dtype,
    largest_H: Tensor | None = None, *, in_cuda: bool,
) -> Tensor:  # fmt: skip
    """`attend.attend` of operands of one dtype; the result in `out_dtype`. `in_cuda`: by kernels that take these operands."""
    shape = q_BTHK.shape[:3]
    if largest_H is not None and not in_cuda:
        largest_H.copy_(torch.maximum(largest_H, max_logit(q_BTHK, k_BSHK, scale, segments, past).to(largest_H)))
        largest_H = None
    q, k, v = rows(q_BTHK, k_BSHK, v_BSHV)
    layout = None
    if segments is not None:  # the kernels see one row of tokens
        layout = Layout.of(segments)
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
    options = scale, layout, past, out_dtype, largest_H, in_cuda
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        out = _Attend.apply(q, k, v, *options)
    else:
        out, _ = _forward(q, k, v, *options, training=False)
    return out.view(*shape, -1)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, layout: Layout | None, past: int, out_dtype: torch.dtype,
    largest_H: Tensor | None, in_cuda: bool, *, training: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """o `[B, T, H, V]`, and for training log2 of the denominators `[B, H, T]`."""
    if not in_cuda:
        from perilune.ops.mla import triton_attend

        return triton_attend.forward(q, k, v, scale, layout, past, out_dtype, training)
    batch, tokens, heads, _ = q.shape
    out = torch.empty(batch, tokens, heads, v.shape[3], dtype=out_dtype, device=q.device)
    logs = torch.empty(batch, heads, tokens, device=q.device) if training else None
    largest = None
    if largest_H is not None:
        largest = torch.empty(batch, heads, blocks(tokens, cuda.QUERIES), cuda.WARPS, device=q.device)
    cuda.attend(q, k, v, scale * LOG2E, None if layout is None else layout.first, None, past, out, logs, largest)
    if largest is not None and largest_H is not None and largest.numel():
        largest_H.copy_(torch.maximum(largest_H, (largest.amax((0, 2, 3)) / LOG2E).to(largest_H)))
    return out, logs


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, layout, past, out_dtype, largest_H, in_cuda):
        out, logs = _forward(q, k, v, scale, layout, past, out_dtype, largest_H, in_cuda, training=True)
        ctx.save_for_backward(q, k, v, out, logs)
        ctx.options = scale, layout, past, in_cuda
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, logs = ctx.saved_tensors
        scale, layout, past, in_cuda = ctx.options
        if not out.numel():
            gradients = tuple(torch.zeros_like(x) for x in (q, k, v))
        elif in_cuda:
            first, end = (None, None) if layout is None else layout
            dout = cuda_backward.readable(dout)
            gradients = cuda_backward.backward(q, k, v, out, logs, dout, scale, scale * LOG2E, first, end, past)
        else:
            from perilune.ops.mla.triton_attend_backward import backward

            gradients = backward(q, k, v, out, logs, dout, scale, layout, past)
        return *gradients, None, None, None, None, None, None
