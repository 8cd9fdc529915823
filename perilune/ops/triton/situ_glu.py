"""SiTU-GLU and SwiGLU on a CUDA device: one pass forward, one pass backward, nothing saved but the two inputs.

tanh is 2 sigmoid(2x) - 1 of exp: the hardware's approximate tanh is off by 5e-4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.native.rows import as_rows, fresh
from perilune.ops.triton.gates import sigmoid
from perilune.ops.triton.sizes import blocks, power_of_two

BLOCK = 2048  # numbers of a row that one program takes
WARPS = 4


@triton.jit
def _capped(x, cap, CAPPED: tl.constexpr):
    """cap * tanh(x / cap) and its slope 1 - tanh^2; x and 1 without a cap."""
    if CAPPED:
        half = sigmoid(2.0 * x / cap)
        # 1 - tanh^2 = 4 half (1 - half): exact zero where the cap is reached, never an infinity
        return cap * (2.0 * half - 1.0), 4.0 * half * (1.0 - half)
    return x, tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _forward_kernel(
    gate, gate_stride, up, up_stride, y, F, beta, linear_beta, BLOCK: tl.constexpr, GATE_CAPPED: tl.constexpr,
    UP_CAPPED: tl.constexpr,
):  # fmt: skip
    pieces = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    at = (tl.program_id(0) % pieces).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < F
    a = tl.load(gate + row * gate_stride + at, inside, 0.0).to(tl.float32)
    b = tl.load(up + row * up_stride + at, inside, 0.0).to(tl.float32)
    left, _ = _capped(a, beta, GATE_CAPPED)
    right, _ = _capped(b, linear_beta, UP_CAPPED)
    tl.store(y + row * F + at, (left * sigmoid(a) * right).to(y.dtype.element_ty), inside)


@triton.jit
def _backward_kernel(
    gate, gate_stride, up, up_stride, dy, dy_stride, dgate, dup, F, beta, linear_beta, BLOCK: tl.constexpr,
    GATE_CAPPED: tl.constexpr, UP_CAPPED: tl.constexpr,
):  # fmt: skip
    pieces = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    at = (tl.program_id(0) % pieces).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < F
    a = tl.load(gate + row * gate_stride + at, inside, 0.0).to(tl.float32)
    b = tl.load(up + row * up_stride + at, inside, 0.0).to(tl.float32)
    d = tl.load(dy + row * dy_stride + at, inside, 0.0).to(tl.float32)
    left, left_slope = _capped(a, beta, GATE_CAPPED)
    right, right_slope = _capped(b, linear_beta, UP_CAPPED)
    opened = sigmoid(a)
    da = d * right * (opened * left_slope + opened * (1.0 - opened) * left)
    db = d * left * opened * right_slope
    tl.store(dgate + row * F + at, da.to(dgate.dtype.element_ty), inside)
    tl.store(dup + row * F + at, db.to(dup.dtype.element_ty), inside)


def gated_unit(gate: Tensor, up: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    """`situ_glu`, or `swiglu` where both caps are None; differentiable."""
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _GatedUnit.apply(gate, up, beta, linear_beta)
    return forward(gate, up, beta, linear_beta)


class _GatedUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, beta, linear_beta):
        ctx.save_for_backward(gate, up)
        ctx.caps = beta, linear_beta
        return forward(gate, up, beta, linear_beta)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return *backward(*ctx.saved_tensors, dy, *ctx.caps), None, None


def forward(gate: Tensor, up: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    """Launch the forward kernel."""
    y = fresh(gate)
    if y.numel():
        (gate, up), strides, programs, options = _rows([gate, up], beta, linear_beta)
        _forward_kernel[(programs,)](gate, strides[0], up, strides[1], y, **options)
    return y


def backward(
    gate: Tensor, up: Tensor, dy: Tensor, beta: float | None, linear_beta: float | None
) -> tuple[Tensor, Tensor]:
    """Launch the backward kernel."""
    dgate, dup = fresh(gate), fresh(up)
    if dgate.numel():
        (gate, up, dy), strides, programs, options = _rows([gate, up, dy], beta, linear_beta)
        _backward_kernel[(programs,)](gate, strides[0], up, strides[1], dy, strides[2], dgate, dup, **options)
    return dgate, dup


def _rows(
    inputs: list[Tensor], beta: float | None, linear_beta: float | None
) -> tuple[list[Tensor], list[int], int, dict[str, float | int | bool]]:
    """The inputs as rows, their strides, the programs to launch, and the options; dense inputs count as a single row."""
    if all(x.is_contiguous() for x in inputs):
        rows, width = 1, inputs[0].numel()
        views, strides = inputs, [width] * len(inputs)
    else:
        width = inputs[0].shape[-1]
        rows = inputs[0].numel() // width
        views, strides = zip(*[as_rows(x) for x in inputs], strict=True)
    block = min(BLOCK, power_of_two(width))
    options = {
        "F": width,
        "beta": beta or 0.0,
        "linear_beta": linear_beta or 0.0,
        "BLOCK": block,
        "GATE_CAPPED": beta is not None,
        "UP_CAPPED": linear_beta is not None,
        "num_warps": max(1, min(WARPS, block // 256)),
    }
    return list(views), list(strides), rows * blocks(width, block), options
