"""RMSNorm, L2 norm, and the sigmoid-gated RMSNorm at the output of KDA (report §2.1.1).

    rms_norm:        y = x * w / sqrt(mean(x^2) + eps)
    l2_norm:         y = x / sqrt(sum(x^2) + eps)             eps is added to the SUM
    gated_rms_norm:  y = rms_norm(o) * sigmoid(gate)          norm first, then the gate

All compute in float32 inside (float64 for float64 inputs) and return the input's dtype. The backward passes are written
by hand and save the inputs and one number a row; `*_reference` are the plain formulas.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.errors import ConfigError
from perilune.ops.choice import Choice
from perilune.ops.native.rows import as_rows, blocks_for, choose, entry, fresh, parameter, threads_for
from perilune.ops.triton.available import choose as choose_triton

MAX_TRITON_WIDTH = 16384  # a program holds a whole row


def select(x: Tensor, *others: Tensor) -> Choice:
    """Say which implementation the norms use for these activations, and why."""
    choice = choose_triton(x, *others) or choose("elementwise", x, *others)
    if choice.implementation == "triton" and x.shape[-1] > MAX_TRITON_WIDTH:
        return Choice("torch", f"the Triton kernels take rows of at most {MAX_TRITON_WIDTH} numbers, not {x.shape[-1]}")
    return choice


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension.

    Args:
        x: [..., D].
        weight_D: [D], any float dtype; its gradient has that dtype.
        eps: added to the mean of squares.

    Returns:
        [..., D] in x's dtype.

    Raises:
        ConfigError: the weight's length is not D.
    """
    _check_weight(x, weight_D)
    implementation = select(x).implementation
    if implementation == "reference":
        return rms_norm_reference(x, weight_D, eps)
    if implementation == "triton":
        return _triton_norm(x, None, weight_D, eps, 1.0 / x.shape[-1])
    if torch.is_grad_enabled() and (x.requires_grad or weight_D.requires_grad):
        return _Norm.apply(x, weight_D, eps, True, implementation == "native")
    if implementation == "native":
        return _native_norm(x, weight_D, eps, 1.0 / x.shape[-1], statistics=False)[0]
    return _torch_norm(x, weight_D, eps, 1.0 / x.shape[-1])[0]


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Scale the last dimension to unit length: x / sqrt(sum(x^2) + eps). [..., D] -> [..., D] in x's dtype."""
    implementation = select(x).implementation
    if implementation == "reference":
        return l2_norm_reference(x, eps)
    if implementation == "triton":
        return _triton_norm(x, None, None, eps, 1.0)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Norm.apply(x, None, eps, False, implementation == "native")
    if implementation == "native":
        return _native_norm(x, None, eps, 1.0, statistics=False)[0]
    return _torch_norm(x, None, eps, 1.0)[0]


def gated_rms_norm(o_BTHV: Tensor, gate_BTHV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """RMSNorm over the value channels of a head, times the weight, times sigmoid(gate).

    Args:
        o_BTHV: [..., V], for example [2, 512, 4, 64].
        gate_BTHV: [..., V] logits, same shape.
        weight_V: [V], shared by all heads.
        eps: added to the mean of squares.

    Returns:
        [..., V] in o's dtype.

    Raises:
        ConfigError: shapes disagree.
    """
    _check_weight(o_BTHV, weight_V)
    if o_BTHV.shape != gate_BTHV.shape:
        raise ConfigError(
            f"gated_rms_norm got o {list(o_BTHV.shape)} and gate {list(gate_BTHV.shape)}; they must have one shape"
        )
    implementation = select(o_BTHV, gate_BTHV).implementation
    if implementation == "reference":
        return gated_rms_norm_reference(o_BTHV, gate_BTHV, weight_V, eps)
    if implementation == "triton":
        return _triton_norm(o_BTHV, gate_BTHV, weight_V, eps, 1.0 / o_BTHV.shape[-1])
    if torch.is_grad_enabled() and (o_BTHV.requires_grad or gate_BTHV.requires_grad or weight_V.requires_grad):
        return _GatedNorm.apply(o_BTHV, gate_BTHV, weight_V, eps, implementation == "native")
    if implementation == "native":
        return _native_gated_norm(o_BTHV, gate_BTHV, weight_V, eps, statistics=False)[0]
    return _torch_gated_norm(o_BTHV, gate_BTHV, weight_V, eps)[0]


def rms_norm_reference(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The formula of `rms_norm`, differentiated by autograd."""
    exact = torch.promote_types(x.dtype, torch.float32)
    x_exact = x.to(exact)
    return (x_exact * (x_exact.square().mean(-1, keepdim=True) + eps).rsqrt() * weight_D.to(exact)).to(x.dtype)


def l2_norm_reference(x: Tensor, eps: float = 1e-6) -> Tensor:
    """The formula of `l2_norm`, differentiated by autograd."""
    x_exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return (x_exact * (x_exact.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def gated_rms_norm_reference(o_BTHV: Tensor, gate_BTHV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """The formula of `gated_rms_norm`, differentiated by autograd."""
    exact = torch.promote_types(o_BTHV.dtype, torch.float32)
    normed = rms_norm_reference(o_BTHV.to(exact), weight_V, eps)
    return (normed * gate_BTHV.to(exact).sigmoid()).to(o_BTHV.dtype)


def _check_weight(x: Tensor, weight_D: Tensor) -> None:
    if weight_D.shape != x.shape[-1:]:
        raise ConfigError(
            f"the norm's weight has shape {list(weight_D.shape)}; an input {list(x.shape)} needs [{x.shape[-1]}]"
        )


def _triton_norm(x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, inverse: float) -> Tensor:
    from perilune.ops.triton.norm import norm

    return norm(x, gate, weight, eps, inverse)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_D, eps, mean, native):
        ctx.inverse, ctx.native = 1.0 / x.shape[-1] if mean else 1.0, native
        y, rstd = _native_norm(x, weight_D, eps, ctx.inverse) if native else _torch_norm(x, weight_D, eps, ctx.inverse)
        ctx.save_for_backward(x, weight_D, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight_D, rstd = ctx.saved_tensors
        step = _native_norm_backward if ctx.native else _torch_norm_backward
        dx, dweight_D = step(x, weight_D, rstd, dy, ctx.inverse)
        return dx, dweight_D, None, None, None


def _torch_norm(x, weight_D, eps, inverse):
    exact = torch.promote_types(x.dtype, torch.float32)
    x_exact = x.to(exact)
    rstd = (x_exact.square().sum(-1, keepdim=True) * inverse + eps).rsqrt()
    y = x_exact * rstd
    return (y if weight_D is None else y * weight_D.to(exact)).to(x.dtype), rstd


def _torch_norm_backward(x, weight_D, rstd, dy, inverse):
    exact = rstd.dtype
    dy = dy.to(exact)
    normed = x.to(exact) * rstd
    scaled = dy if weight_D is None else dy * weight_D.to(exact)
    dx = (scaled - normed * ((scaled * normed).sum(-1, keepdim=True) * inverse)) * rstd
    dweight_D = None if weight_D is None else (dy * normed).reshape(-1, x.shape[-1]).sum(0).to(weight_D.dtype)
    return dx.to(x.dtype), dweight_D


def _native_norm(x, weight_D, eps, inverse, statistics=True):
    width = x.shape[-1]
    x_rows, stride = as_rows(x)
    y = fresh(x)
    rows = x.numel() // width if width else 0
    rstd = torch.empty(rows) if statistics else None
    weight = None if weight_D is None else parameter(weight_D)
    entry("elementwise", "norm_forward", x.dtype, "plpppllffi")(
        x_rows.data_ptr(), stride, None if weight is None else weight.data_ptr(), y.data_ptr(),
        None if rstd is None else rstd.data_ptr(), rows, width, inverse, eps, threads_for(rows * width))  # fmt: skip
    return y, rstd


def _native_norm_backward(x, weight_D, rstd, dy, inverse):
    width, rows = x.shape[-1], len(rstd)
    blocks = blocks_for(rows)
    x_rows, stride = as_rows(x)
    dy_rows, dy_stride = as_rows(dy)
    dx = fresh(x)
    partial = torch.empty(blocks, width)
    weight = None if weight_D is None else parameter(weight_D)
    dweight_D = None if weight_D is None else torch.empty(width)
    entry("elementwise", "norm_backward", x.dtype, "plppplppplllfi")(
        x_rows.data_ptr(), stride, None if weight is None else weight.data_ptr(), rstd.data_ptr(), dy_rows.data_ptr(),
        dy_stride, dx.data_ptr(), partial.data_ptr(), None if dweight_D is None else dweight_D.data_ptr(), blocks, rows,
        width, inverse, threads_for(rows * width))  # fmt: skip
    return dx, None if weight_D is None else dweight_D.to(weight_D.dtype)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o, gate, weight_V, eps, native):
        ctx.native = native
        y, rstd = (_native_gated_norm if native else _torch_gated_norm)(o, gate, weight_V, eps)
        ctx.save_for_backward(o, gate, weight_V, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        step = _native_gated_norm_backward if ctx.native else _torch_gated_norm_backward
        return *step(*ctx.saved_tensors, dy), None, None


def _torch_gated_norm(o, gate, weight_V, eps):
    exact = torch.promote_types(o.dtype, torch.float32)
    normed, rstd = _torch_norm(o.to(exact), weight_V, eps, 1.0 / o.shape[-1])
    return (normed * gate.to(exact).sigmoid()).to(o.dtype), rstd


def _torch_gated_norm_backward(o, gate, weight_V, rstd, dy):
    exact = rstd.dtype
    dy, o_exact = dy.to(exact), o.to(exact)
    opened = gate.to(exact).sigmoid()
    dgate = dy * (o_exact * rstd * weight_V.to(exact)) * (opened * (1 - opened))
    do, dweight_V = _torch_norm_backward(o_exact, weight_V, rstd, dy * opened, 1.0 / o.shape[-1])
    return do.to(o.dtype), dgate.to(gate.dtype), dweight_V


def _native_gated_norm(o, gate, weight_V, eps, statistics=True):
    width = o.shape[-1]
    rows = o.numel() // width if width else 0
    o_rows, o_stride = as_rows(o)
    gate_rows, gate_stride = as_rows(gate)
    weight = parameter(weight_V)
    y = fresh(o)
    rstd = torch.empty(rows) if statistics else None
    entry("elementwise", "gated_norm_forward", o.dtype, "plplpppllffi")(
        o_rows.data_ptr(), o_stride, gate_rows.data_ptr(), gate_stride, weight.data_ptr(), y.data_ptr(),
        None if rstd is None else rstd.data_ptr(), rows, width, 1.0 / width, eps, threads_for(rows * width))  # fmt: skip
    return y, rstd


def _native_gated_norm_backward(o, gate, weight_V, rstd, dy):
    width, rows = o.shape[-1], len(rstd)
    blocks = blocks_for(rows)
    o_rows, o_stride = as_rows(o)
    gate_rows, gate_stride = as_rows(gate)
    dy_rows, dy_stride = as_rows(dy)
    weight = parameter(weight_V)
    do, dgate = fresh(o), fresh(o)
    partial, dweight_V = torch.empty(blocks, 2, width), torch.empty(width)
    entry("elementwise", "gated_norm_backward", o.dtype, "plplpppl" + "pppplll" + "fi")(
        o_rows.data_ptr(), o_stride, gate_rows.data_ptr(), gate_stride, weight.data_ptr(), rstd.data_ptr(),
        dy_rows.data_ptr(), dy_stride, do.data_ptr(), dgate.data_ptr(), partial.data_ptr(), dweight_V.data_ptr(), blocks,
        rows, width, 1.0 / width, threads_for(rows * width))  # fmt: skip
    return do, dgate, dweight_V.to(weight_V.dtype)
