"""Gated units: SiTU-GLU (report Table 1) and SwiGLU.

    situ_glu: y = beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)
    swiglu:   y = gate * sigmoid(gate) * up

|situ_glu| <= beta * linear_beta (100 for K3's 4 and 25). The sigmoid takes the raw gate, not the capped one. Computed in
float32 inside (float64 for float64 inputs); the result has the input's dtype. The backward is written by hand and saves
nothing but the two inputs. tanh is written as 2 sigmoid(2x) - 1: torch's tanh is ten times slower than its sigmoid on a
CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.errors import ConfigError
from perilune.ops.choice import Choice
from perilune.ops.native.rows import as_rows, choose, entry, fresh, threads_for
from perilune.ops.triton.available import choose as choose_triton


def select(gate: Tensor, up: Tensor) -> Choice:
    """Say which implementation the gated units use for these activations, and why."""
    return choose_triton(gate, up) or choose("elementwise", gate, up)


def situ_glu(gate: Tensor, up: Tensor, beta: float = 4.0, linear_beta: float | None = 25.0) -> Tensor:
    """Sigmoid-tanh gated unit.

    Args:
        gate: [..., F].
        up: [..., F].
        beta: cap on the gate side, above 0.
        linear_beta: cap on the up side, above 0; None lets it pass unclamped.

    Returns:
        [..., F] in the inputs' dtype.

    Raises:
        ConfigError: shapes differ, or a cap is not positive.
    """
    if not beta > 0 or not (linear_beta is None or linear_beta > 0):
        raise ConfigError(
            f"situ_glu got beta={beta}, linear_beta={linear_beta}; both must be above 0 (linear_beta may be none)"
        )
    return _glu(gate, up, float(beta), linear_beta)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. [..., F], [..., F] -> [..., F] in the inputs' dtype.

    Raises:
        ConfigError: shapes differ.
    """
    return _glu(gate, up, None, None)


def glu(name: str) -> Callable[..., Tensor]:
    """Return the gated unit of that name: "situ" or "swiglu".

    Raises:
        ConfigError: no such unit.
    """
    if name not in GLUS:
        raise ConfigError(f"activation {name!r} is not known; allowed: {', '.join(GLUS)}")
    return GLUS[name]


GLUS: dict[str, Callable[..., Tensor]] = {"situ": situ_glu, "swiglu": swiglu}


def situ_glu_reference(gate: Tensor, up: Tensor, beta: float | None = 4.0, linear_beta: float | None = 25.0) -> Tensor:
    """The formula of `situ_glu` (of `swiglu` if beta is None), differentiated by autograd."""
    exact = torch.promote_types(gate.dtype, torch.float32)
    a, b = gate.to(exact), up.to(exact)
    left = (a if beta is None else beta * torch.tanh(a / beta)) * torch.sigmoid(a)
    return (left * (b if linear_beta is None else linear_beta * torch.tanh(b / linear_beta))).to(gate.dtype)


def _glu(gate: Tensor, up: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    if gate.shape != up.shape:
        raise ConfigError(
            f"the gated unit got gate {list(gate.shape)} and up {list(up.shape)}; they must have one shape"
        )
    implementation = select(gate, up).implementation
    if implementation == "reference":
        return situ_glu_reference(gate, up, beta, linear_beta)
    if implementation == "triton":
        from perilune.ops.triton.situ_glu import gated_unit

        return gated_unit(gate, up, beta, linear_beta)
    native = implementation == "native"
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _GLU.apply(gate, up, beta, linear_beta, native)
    return (_native_forward if native else _torch_forward)(gate, up, beta, linear_beta)


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, beta, linear_beta, native):
        ctx.save_for_backward(gate, up)
        ctx.caps, ctx.native = (beta, linear_beta), native
        return (_native_forward if native else _torch_forward)(gate, up, beta, linear_beta)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        dgate, dup = (_native_backward if ctx.native else _torch_backward)(gate, up, dy, *ctx.caps)
        return dgate, dup, None, None, None


def _capped(x: Tensor, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return cap * tanh(x / cap) and its derivative 1 - tanh^2 (x and None without a cap)."""
    if cap is None:
        return x, None
    tanh = torch.sigmoid(x * (2.0 / cap)).mul_(2.0).sub_(1.0)
    return tanh * cap, tanh.square().neg_().add_(1.0)


def _torch_forward(gate, up, beta, linear_beta):
    exact = torch.promote_types(gate.dtype, torch.float32)
    a = gate.to(exact)
    return (_capped(a, beta)[0] * torch.sigmoid(a) * _capped(up.to(exact), linear_beta)[0]).to(gate.dtype)


def _torch_backward(gate, up, dy, beta, linear_beta):
    exact = torch.promote_types(gate.dtype, torch.float32)
    a, dy = gate.to(exact), dy.to(exact)
    left, left_slope = _capped(a, beta)
    right, right_slope = _capped(up.to(exact), linear_beta)
    opened = torch.sigmoid(a)
    slope = opened * (1 - opened) * left
    slope = slope + (opened if left_slope is None else opened * left_slope)
    dup = dy * left * opened
    return (dy * right * slope).to(gate.dtype), (dup if right_slope is None else dup * right_slope).to(up.dtype)


def _native_forward(gate, up, beta, linear_beta):
    width = gate.shape[-1]
    rows = gate.numel() // width if width else 0
    gate_rows, gate_stride = as_rows(gate)
    up_rows, up_stride = as_rows(up)
    y = fresh(gate)
    entry("elementwise", "glu_forward", gate.dtype, "plplpllffi")(
        gate_rows.data_ptr(), gate_stride, up_rows.data_ptr(), up_stride, y.data_ptr(), rows, width, beta or 0.0,
        linear_beta or 0.0, threads_for(rows * width))  # fmt: skip
    return y


def _native_backward(gate, up, dy, beta, linear_beta):
    width = gate.shape[-1]
    rows = gate.numel() // width if width else 0
    gate_rows, gate_stride = as_rows(gate)
    up_rows, up_stride = as_rows(up)
    dy_rows, dy_stride = as_rows(dy)
    dgate, dup = fresh(gate), fresh(gate)
    entry("elementwise", "glu_backward", gate.dtype, "plplplppllffi")(
        gate_rows.data_ptr(), gate_stride, up_rows.data_ptr(), up_stride, dy_rows.data_ptr(), dy_stride, dgate.data_ptr(),
        dup.data_ptr(), rows, width, beta or 0.0, linear_beta or 0.0, threads_for(rows * width))  # fmt: skip
    return dgate, dup
