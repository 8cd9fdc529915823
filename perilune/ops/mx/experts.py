"""Routed experts on MXFP4 weights: with activations as they are (W4A16), or rounded to MXFP8 before each product (W4A8).

    W4A16:  y_e = W2 glu(W1 z, W3 z)               W4A8:  y_e = W2 Q(glu(W1 Q(z), W3 Q(z)))

with W1, W2, W3 decoded from their codes. The released K3 was trained as W4A8, its configuration names no activation format,
and engines run either (architecture §9.3), so both are here. The form in torch is the definition: each used expert's weights
are decoded when its rows are multiplied, so at most one expert is dense at a time. On a GPU the kernels of `triton_experts`,
and for few tokens those of `cuda.experts`, decode in registers, from weights that `pack` has rearranged once; a product of bfloat16 holds both factors exactly, as an
MXFP8 value has four significant bits.

`rounded_input_experts` is the training side of W4A8: dense weights that were rounded before, gradients straight through
both roundings: dX = dY Q(W)^T and dW = Q(X)^T dY. Like `moe.experts` it saves no expert output and recomputes the hidden
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.choice import Choice, forced
from perilune.ops.moe.plan import DispatchPlan, dispatch_plan
from perilune.ops.mx.codec import dequantize_mxfp4, quantize_mxfp4
from perilune.ops.mx.cuda import experts as cuda
from perilune.ops.mx.fake_quant import fake_quantize
from perilune.ops.mx.pack import DeviceWeight
from perilune.ops.situ_glu import GLUS, glu
from perilune.ops.triton import available

ACTIVATIONS = ("none", "mxfp8")

Caps = tuple[float, float | None] | None  # of SiTU; None = SwiGLU
Matrices = Callable[[int], tuple[Tensor, Tensor, Tensor]]  # expert -> w1 [F, L], w3 [F, L], w2 [L, F]


class PackedWeight(NamedTuple):
    """MXFP4 matrices of all experts: codes, uint8 `[E, O, I/2]`, and scales, uint8 `[E, O, I/32]`."""

    codes: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight_EOI: Tensor, rule: str = "floor") -> PackedWeight:
        """Encode dense weights (`quantize_mxfp4`, with its errors)."""
        return cls(*quantize_mxfp4(weight_EOI, rule))

    def expert(self, e: int, dtype: torch.dtype) -> Tensor:
        """The dense matrix `[O, I]` of expert e."""
        return dequantize_mxfp4(self.codes[e], self.scale[e], dtype)


def select(z_NL: Tensor, index_NA: Tensor, w1: PackedWeight | DeviceWeight) -> Choice:
    """Return which implementation `packed_experts` takes for these tokens, routes and weights, and why."""
    wanted = forced()
    if isinstance(w1, DeviceWeight) and (wanted == "cuda" or z_NL.is_cuda and wanted is None):
        reason = cuda.why_not(z_NL, index_NA, len(w1.codes))
        if reason is None:
            return Choice("cuda", "few pairs of a token and an expert: two launches, no plan")
        if wanted == "cuda":
            return Choice("torch", f"cuda was asked for, but {reason}")
    choice = available.choose(z_NL)
    if choice is None:
        return Choice("torch", "each used expert is decoded before its product")
    if choice.implementation != "triton":
        return choice
    if not isinstance(w1, DeviceWeight):
        return Choice("torch", "plain torch: the weights lie as they are published; mx.pack them once for the kernels")
    if z_NL.dtype != torch.bfloat16 and z_NL.is_cuda:
        return Choice("torch", f"plain torch: the kernels multiply bfloat16, the tokens are {str(z_NL.dtype)[6:]}")
    return choice


def packed_experts(
    z_NL: Tensor,
    index_NA: Tensor,
    weight_NA: Tensor,
    w1: PackedWeight | DeviceWeight,
    w3: PackedWeight | DeviceWeight,
    w2: PackedWeight | DeviceWeight,
    activation: str = "situ",
    *,
    beta: float = 4.0,
    linear_beta: float | None = 25.0,
    activations: str = "none",
    rule: str = "floor",
) -> Tensor:
    """`moe.routed_experts` on packed weights, without gradients.

    Args:
        z_NL: `[N, L]` tokens, float32, bfloat16 or float64.
        index_NA: int64 `[N, A]` chosen experts.
        weight_NA: `[N, A]` mixing weights, fp32 (fp64 for fp64 tokens).
        w1: gate weights of all experts, `[E, F, L]` unpacked; all three as published, or all rearranged by `pack`.
        w3: up weights, alike.
        w2: down weights, `[E, L, F]` unpacked.
        activation: "situ" or "swiglu".
        beta: cap of SiTU's gate side.
        linear_beta: cap of SiTU's up side; None = none.
        activations: "none" (W4A16) or "mxfp8" (W4A8).
        rule: how scales of activations are chosen.

    Returns:
        `[N, L]` in the tokens' dtype. Sums run in fp32 (fp64).

    Raises:
        ConfigError: the activation function, the format of activations or the rule is unknown.
    """
    caps = _caps(activation, beta, linear_beta)
    if activations not in ACTIVATIONS:
        raise ConfigError(f"activations={activations!r} is not known; allowed: {', '.join(ACTIVATIONS)}")

    def dense(e: int) -> tuple[Tensor, Tensor, Tensor]:
        return w1.expert(e, z_NL.dtype), w3.expert(e, z_NL.dtype), w2.expert(e, z_NL.dtype)

    with torch.no_grad():
        hidden_rule = None if activations == "none" else rule
        z_NL = z_NL if hidden_rule is None else fake_quantize(z_NL, "mxfp8", hidden_rule)
        choice = select(z_NL, index_NA, w1).implementation if len(z_NL) else "torch"
        if choice == "cuda":
            return cuda.experts(z_NL, index_NA, weight_NA, w1, w3, w2, caps, hidden_rule)
        if choice == "triton":
            from perilune.ops.mx import triton_experts

            return triton_experts.experts(z_NL, index_NA, weight_NA, w1, w3, w2, caps, hidden_rule)
        plan = dispatch_plan(index_NA, w1.codes.shape[0])
        return _forward(z_NL, weight_NA, plan, dense, caps, hidden_rule)


def rounded_input_experts(
    z_NL: Tensor,
    index_NA: Tensor,
    weight_NA: Tensor,
    w1_EFL: Tensor,
    w3_EFL: Tensor,
    w2_ELF: Tensor,
    activation: str = "situ",
    *,
    beta: float = 4.0,
    linear_beta: float | None = 25.0,
    rule: str = "floor",
) -> Tensor:
    """`moe.routed_experts` whose products take their activations in MXFP8; weights are used as they are.

    Args:
        z_NL: `[N, L]` tokens; the rest as in `packed_experts`, the weights dense, in the tokens' dtype or fp32.
        rule: how scales of activations are chosen.

    Returns:
        `[N, L]` in the tokens' dtype; differentiable in tokens, mixing weights and expert weights.

    Raises:
        ConfigError: the activation function or the rule is unknown.
    """
    caps = _caps(activation, beta, linear_beta)
    plan = dispatch_plan(index_NA, w1_EFL.shape[0])
    return _RoundedInputs.apply(fake_quantize(z_NL, "mxfp8", rule), weight_NA, w1_EFL, w3_EFL, w2_ELF, plan, caps, rule)


def _caps(activation: str, beta: float, linear_beta: float | None) -> Caps:
    if activation not in GLUS:
        raise ConfigError(f"activation {activation!r} is not known; allowed: {', '.join(GLUS)}")
    return (float(beta), linear_beta) if activation == "situ" else None


def _activate(gate_RF: Tensor, up_RF: Tensor, caps: Caps) -> Tensor:
    return glu("swiglu")(gate_RF, up_RF) if caps is None else glu("situ")(gate_RF, up_RF, *caps)


def _rows(plan: DispatchPlan, active: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, its (token, slot) numbers, their tokens) for each expert that has rows."""
    offsets = plan.offset_E1.tolist()
    token_R = plan.slot_R // active
    for e in range(len(offsets) - 1):
        rows = slice(offsets[e], offsets[e + 1])
        if rows.start < rows.stop:
            yield e, plan.slot_R[rows], token_R[rows]


def _forward(
    z_NL: Tensor, weight_NA: Tensor, plan: DispatchPlan, dense: Matrices, caps: Caps, hidden_rule: str | None
) -> Tensor:
    out_NL = z_NL.new_zeros(z_NL.shape, dtype=torch.promote_types(z_NL.dtype, torch.float32))
    for e, slot_R, token_R in _rows(plan, weight_NA.shape[1]):
        x_RL, (w1_FL, w3_FL, w2_LF) = z_NL[token_R], dense(e)
        h_RF = _activate(x_RL @ w1_FL.T, x_RL @ w3_FL.T, caps)
        if hidden_rule is not None:
            h_RF = fake_quantize(h_RF, "mxfp8", hidden_rule)
        out_NL.index_add_(0, token_R, (h_RF @ w2_LF.T) * weight_NA.flatten()[slot_R, None])
    return out_NL.to(z_NL.dtype)


class _RoundedInputs(torch.autograd.Function):
    """The tokens come rounded; the hidden values are rounded here, and again in the backward pass."""

    @staticmethod
    def forward(ctx, z_NL, weight_NA, w1_EFL, w3_EFL, w2_ELF, plan, caps, rule):
        ctx.save_for_backward(z_NL, weight_NA, w1_EFL, w3_EFL, w2_ELF)
        ctx.plan, ctx.caps, ctx.rule = plan, caps, rule
        weights = (w1_EFL, w3_EFL, w2_ELF)
        return _forward(z_NL, weight_NA, plan, lambda e: tuple(w[e].to(z_NL.dtype) for w in weights), caps, rule)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout_NL):
        z_NL, weight_NA, *weights = ctx.saved_tensors
        accumulator = torch.promote_types(z_NL.dtype, torch.float32)
        dz_NL = z_NL.new_zeros(z_NL.shape, dtype=accumulator)
        dweight_R = torch.zeros_like(weight_NA).flatten()
        dw1_EFL, dw3_EFL, dw2_ELF = (torch.zeros_like(w) for w in weights)
        for e, slot_R, token_R in _rows(ctx.plan, weight_NA.shape[1]):
            x_RL, dy_RL = z_NL[token_R], dout_NL[token_R]
            w1_FL, w3_FL, w2_LF = (w[e].to(x_RL.dtype) for w in weights)
            p_R1 = weight_NA.flatten()[slot_R, None]
            d_RF = dy_RL @ w2_LF
            with torch.enable_grad():
                gate_RF, up_RF = (x_RL @ w1_FL.T).requires_grad_(), (x_RL @ w3_FL.T).requires_grad_()
                h_RF = _activate(gate_RF, up_RF, ctx.caps)
            dgate_RF, dup_RF = torch.autograd.grad(h_RF, (gate_RF, up_RF), (d_RF * p_R1).to(h_RF.dtype))
            h_RF = fake_quantize(h_RF.detach(), "mxfp8", ctx.rule)
            dweight_R[slot_R] = (h_RF.to(p_R1.dtype) * d_RF).sum(-1)
            dw2_ELF[e] = dy_RL.T @ (h_RF * p_R1).to(dy_RL.dtype)
            dw1_EFL[e], dw3_EFL[e] = dgate_RF.T @ x_RL, dup_RF.T @ x_RL
            dz_NL.index_add_(0, token_R, (dgate_RF @ w1_FL + dup_RF @ w3_FL).to(accumulator))
        return dz_NL.to(z_NL.dtype), dweight_R.view_as(weight_NA), dw1_EFL, dw3_EFL, dw2_ELF, None, None, None
