"""x · sigmoid(gate) on a CUDA device: one pass forward, one backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.native.rows import fresh
from perilune.ops.triton.gates import sigmoid
from perilune.ops.triton.sizes import blocks

BLOCK, WARPS = 2048, 4


@triton.jit
def _forward_kernel(x, gate, y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    opened = sigmoid(tl.load(gate + at, inside, 0.0).to(tl.float32))
    value = tl.load(x + at, inside, 0.0).to(tl.float32) * opened
    tl.store(y + at, value.to(y.dtype.element_ty), inside)


@triton.jit
def _backward_kernel(x, gate, dy, dx, dgate, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    opened = sigmoid(tl.load(gate + at, inside, 0.0).to(tl.float32))
    pull = tl.load(dy + at, inside, 0.0).to(tl.float32) * opened
    tl.store(dx + at, pull.to(dx.dtype.element_ty), inside)
    slope = pull * tl.load(x + at, inside, 0.0).to(tl.float32) * (1.0 - opened)
    tl.store(dgate + at, slope.to(dgate.dtype.element_ty), inside)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """`sigmoid_gate` of tensors of one shape, differentiable."""
    if torch.is_grad_enabled() and (x.requires_grad or gate.requires_grad):
        return _Gated.apply(x, gate)
    return forward(x.contiguous(), gate.contiguous())


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate):
        x, gate = x.contiguous(), gate.contiguous()
        ctx.save_for_backward(x, gate)
        return forward(x, gate)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return backward(*ctx.saved_tensors, dy.contiguous())


def forward(x: Tensor, gate: Tensor) -> Tensor:
    """Launch the forward kernel on dense tensors."""
    y = fresh(gate)
    if y.numel():
        _forward_kernel[(blocks(y.numel(), BLOCK),)](x, gate, y, y.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return y


def backward(x: Tensor, gate: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Launch the backward kernel on dense tensors: the gradients of x and the gate."""
    dx, dgate = fresh(x), fresh(gate)
    if dx.numel():
        _backward_kernel[(blocks(dx.numel(), BLOCK),)](x, gate, dy, dx, dgate, dx.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return dx, dgate
