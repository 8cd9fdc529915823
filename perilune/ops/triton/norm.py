"""RMSNorm, L2 norm and the sigmoid-gated RMSNorm on a CUDA device.

    y = x r w sigmoid(gate),   r = 1 / sqrt(inverse * sum(x^2) + eps)       w and gate where there are any

One kernel each way serves the three: `inverse` is 1 / D or 1. A program takes several rows at once; backward it walks
over the rows and sums the weight's gradient in registers, one partial sum a program, added in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.native.rows import as_rows, fresh, parameter
from perilune.ops.triton.available import units
from perilune.ops.triton.gates import sigmoid
from perilune.ops.triton.sizes import blocks, power_of_two

TILE = 2048  # numbers that a program holds at once, if a row is no longer


@triton.jit
def _forward_kernel(
    x, x_stride, gate, gate_stride, weight, y, rstds, rows, inverse, eps, D: tl.constexpr, BD: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    at = tl.arange(0, BD)
    inside = (row < rows)[:, None] & (at < D)[None, :]
    v = tl.load(x + row[:, None] * x_stride + at[None, :], inside, 0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(v * v, 1) * inverse + eps)
    v = v * r[:, None]
    if weight is not None:
        v = v * tl.load(weight + at, at < D, 0.0)[None, :]
    if gate is not None:
        v = v * sigmoid(tl.load(gate + row[:, None] * gate_stride + at[None, :], inside, 0.0).to(tl.float32))
    tl.store(y + row[:, None] * D + at[None, :], v.to(y.dtype.element_ty), inside)
    if rstds is not None:
        tl.store(rstds + row, r, row < rows)


@triton.jit
def _backward_kernel(
    x, x_stride, gate, gate_stride, dy, dy_stride, weight, rstds, dx, dgate, dweight, rows, inverse, D: tl.constexpr,
    BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BD)
    w = tl.full([BD], 1.0, tl.float32)
    if weight is not None:
        w = tl.load(weight + at, at < D, 0.0)
    dw = tl.zeros([BD], tl.float32)
    start = program * BR
    while start < rows:  # the interpreter of 3.6 takes no range over numbers known at run time
        row = start + tl.arange(0, BR)
        inside = (row < rows)[:, None] & (at < D)[None, :]
        r = tl.load(rstds + row, row < rows, 0.0)[:, None]
        normed = tl.load(x + row[:, None] * x_stride + at[None, :], inside, 0.0).to(tl.float32) * r
        d = tl.load(dy + row[:, None] * dy_stride + at[None, :], inside, 0.0).to(tl.float32)
        if gate is not None:
            opened = sigmoid(tl.load(gate + row[:, None] * gate_stride + at[None, :], inside, 0.0).to(tl.float32))
            pull = d * normed * w[None, :] * (opened * (1.0 - opened))
            tl.store(dgate + row[:, None] * D + at[None, :], pull.to(dgate.dtype.element_ty), inside)
            d = d * opened
        if dweight is not None:
            dw += tl.sum(d * normed, 0)
        d = d * w[None, :]
        d = (d - normed * (tl.sum(d * normed, 1) * inverse)[:, None]) * r
        tl.store(dx + row[:, None] * D + at[None, :], d.to(dx.dtype.element_ty), inside)
        start += tl.num_programs(0).to(tl.int64) * BR
    if dweight is not None:
        tl.store(dweight + program * D + at, dw, at < D)


def norm(x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, inverse: float) -> Tensor:
    """Normalise rows [..., D], scale by weight and sigmoid(gate) where given; differentiable. In x's dtype."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, gate, weight)):
        return _Norm.apply(x, gate, weight, eps, inverse)
    return forward(x, gate, weight, eps, inverse)[0]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, eps, inverse):
        y, rstds = forward(x, gate, weight, eps, inverse, training=True)
        ctx.save_for_backward(x, gate, weight, rstds)
        ctx.inverse = inverse
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return *backward(*ctx.saved_tensors, dy, ctx.inverse), None, None


def forward(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, inverse: float, training: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Launch the forward kernel. Returns y, and for training the rows' 1 / norm."""
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    y = fresh(x)
    rstds = torch.empty(rows, device=x.device) if training else None
    if rows:
        x, x_stride = as_rows(x)
        gate, gate_stride = (None, 0) if gate is None else as_rows(gate)
        tile = _tile(width)
        _forward_kernel[(blocks(rows, tile["BR"]),)](
            x, x_stride, gate, gate_stride, None if weight is None else parameter(weight), y, rstds, rows, inverse, eps,
            **tile,
        )  # fmt: skip
    return y, rstds


def backward(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, rstds: Tensor, dy: Tensor, inverse: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Launch the backward kernel. Returns the gradients of x, the gate and the weight."""
    rows, width = len(rstds), x.shape[-1]
    dx, dgate = fresh(x), None if gate is None else fresh(gate)
    tile = _tile(width)
    programs = min(blocks(rows, tile["BR"]), 4 * units(x.device))
    dweight = None if weight is None else torch.empty(programs, width, device=x.device)
    if rows:
        x, x_stride = as_rows(x)
        gate, gate_stride = (None, 0) if gate is None else as_rows(gate)
        dy, dy_stride = as_rows(dy)
        _backward_kernel[(programs,)](
            x, x_stride, gate, gate_stride, dy, dy_stride, None if weight is None else parameter(weight), rstds, dx, dgate,
            dweight, rows, inverse, **tile,
        )  # fmt: skip
    return dx, dgate, None if dweight is None else dweight.sum(0).to(weight.dtype)


def _tile(width: int) -> dict[str, int]:
    columns = power_of_two(width)
    rows = max(1, TILE // columns)
    return {"D": width, "BD": columns, "BR": rows, "num_warps": max(1, min(8, rows * columns // 512))}
