"""The routed experts: out[n] = sum over the chosen e of weight[n,e] * W2_e glu(W1_e z[n], W3_e z[n]).

Rows are sorted by expert once (`plan`), each expert multiplies its contiguous rows, and the sum over a token's experts
runs in a fixed order, so results repeat bit for bit. The backward is written by hand (training, "MoE backward without
saved expert outputs", report §5.2.2): nothing is saved but z, the weights and the plan. With hidden h, output gradient
dy and mixing weight p it recomputes h and uses

    d = dy W2        (needed anyway for dh = p d)
    dp = <h, d>      instead of <dy, h W2^T>, which would need the expert's output
    dW2 = dy^T (p h)

Implementations: "triton" takes CUDA tensors, one grouped product a launch, with the plan made on the device (folder
`triton`); "native" walks the experts in one C call on torch's own BLAS, with each expert's temporaries in cache;
"torch" is a loop over experts in any dtype on any device. A few tokens without gradient take the kernels of `decode` on a
CPU, also where many would take "torch" because bf16 is multiplied in hardware: reading the weights is what takes time there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.choice import Choice, forced
from perilune.ops.moe import native
from perilune.ops.moe.decode import MAX_TOKENS, experts_decode
from perilune.ops.moe.decode import select as select_few
from perilune.ops.moe.plan import DispatchPlan, dispatch_plan
from perilune.ops.native.blas import multiplies_bf16, why_no_blas
from perilune.ops.situ_glu import GLUS, glu
from perilune.ops.triton.available import choose as choose_triton


def select(z_NL: Tensor, w1_EFL: Tensor, *, tracked: bool = True) -> Choice:
    """Return which implementation `routed_experts` takes for these operands, and why; tracked = gradients are wanted."""
    if (wanted := forced()) in ("torch", "reference"):
        return Choice("torch", f"asked for {wanted}")
    if (choice := choose_triton(z_NL)) is not None:
        return _triton_or_torch(choice, z_NL, w1_EFL)
    if _few(z_NL, tracked) and (choice := select_few(z_NL, w1_EFL)).implementation == "native":
        return choice
    reason = native.why_not(z_NL, w1_EFL, dtypes=(torch.float32, torch.bfloat16))
    if reason is None and wanted != "native" and z_NL.dtype == torch.bfloat16 and multiplies_bf16():
        reason = "this CPU multiplies bf16 in hardware, the C path would widen to fp32"
    reason = reason or why_no_blas()
    return Choice("torch", reason) if reason else Choice("native", "fp32 products on CPU, one call for all experts")


def _few(z_NL: Tensor, tracked: bool) -> bool:
    return not tracked and z_NL.shape[0] <= MAX_TOKENS


def _triton_or_torch(choice: Choice, z_NL: Tensor, w1_EFL: Tensor) -> Choice:
    if choice.implementation != "triton":
        return choice
    from perilune.ops.moe.triton.experts import obstacle

    reason = obstacle(z_NL, w1_EFL)
    return choice if reason is None else Choice("torch", f"a loop over experts: {reason}")


def routed_experts(
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
) -> Tensor:
    """Send each token through its experts and mix their outputs.

    Args:
        z_NL: `[N, L]` tokens; N may be 0.
        index_NA: int64 `[N, A]` chosen experts, distinct within a row; an expert may have no token.
        weight_NA: `[N, A]` mixing weights, fp32 (fp64 for fp64 tokens).
        w1_EFL: `[E, F, L]` gate weights, in the tokens' dtype or fp32.
        w3_EFL: `[E, F, L]` up weights.
        w2_ELF: `[E, L, F]` down weights.
        activation: "situ" or "swiglu".
        beta: cap of SiTU's gate side.
        linear_beta: cap of SiTU's up side; None = none.

    Returns:
        `[N, L]` in the tokens' dtype. Sums run in fp32 (fp64).

    Raises:
        ConfigError: the activation is unknown.
    """
    if activation not in GLUS:
        raise ConfigError(f"activation {activation!r} is not known; allowed: {', '.join(GLUS)}")
    experts, hidden, width = w1_EFL.shape
    assert z_NL.shape[1] == width and w3_EFL.shape == w1_EFL.shape and w2_ELF.shape == (experts, width, hidden), (
        f"tokens {tuple(z_NL.shape)}, w1 {tuple(w1_EFL.shape)}, w3 {tuple(w3_EFL.shape)}, w2 {tuple(w2_ELF.shape)}"
    )
    caps = (float(beta), linear_beta) if activation == "situ" else None
    tracked = torch.is_grad_enabled() and any(t.requires_grad for t in (z_NL, weight_NA, w1_EFL, w3_EFL, w2_ELF))
    choice = select(z_NL, w1_EFL, tracked=tracked).implementation
    if choice == "triton":
        from perilune.ops.moe.triton.experts import RoutedExperts

        return RoutedExperts.apply(z_NL, index_NA, weight_NA, w1_EFL, w3_EFL, w2_ELF, caps)
    if choice == "native" and _few(z_NL, tracked):
        return experts_decode(z_NL, index_NA, weight_NA, w1_EFL, w3_EFL, w2_ELF, caps)
    plan = dispatch_plan(index_NA, experts)
    function = _NativeExperts if choice == "native" else _TorchExperts
    return function.apply(z_NL, weight_NA, w1_EFL, w3_EFL, w2_ELF, plan, caps)


class _NativeExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z_NL, weight_NA, w1_EFL, w3_EFL, w2_ELF, plan, caps):
        ctx.save_for_backward(z_NL, weight_NA, w1_EFL, w3_EFL, w2_ELF)
        ctx.plan, ctx.caps = plan, caps
        return native.experts_forward(z_NL, weight_NA, w1_EFL, w3_EFL, w2_ELF, plan, caps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout_NL):
        return *native.experts_backward(*ctx.saved_tensors, ctx.plan, ctx.caps, dout_NL), None, None


class _TorchExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z_NL, weight_NA, w1_EFL, w3_EFL, w2_ELF, plan, caps):
        ctx.save_for_backward(z_NL, weight_NA, w1_EFL, w3_EFL, w2_ELF)
        ctx.plan, ctx.caps = plan, caps
        out_NL = z_NL.new_zeros(z_NL.shape, dtype=_accumulator(z_NL))
        for e, slot_R, token_R in _slices(plan, weight_NA.shape[1]):
            x_RL = z_NL[token_R]
            gate_RF = torch.mm(x_RL, w1_EFL[e].to(x_RL.dtype).T)
            up_RF = torch.mm(x_RL, w3_EFL[e].to(x_RL.dtype).T)
            y_RL = torch.mm(_activate(gate_RF, up_RF, caps), w2_ELF[e].to(x_RL.dtype).T)
            out_NL.index_add_(0, token_R, y_RL * weight_NA.flatten()[slot_R, None])
        return out_NL.to(z_NL.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout_NL):
        z_NL, weight_NA, w1_EFL, w3_EFL, w2_ELF = ctx.saved_tensors
        dz_NL = z_NL.new_zeros(z_NL.shape, dtype=_accumulator(z_NL))
        dweight_R = torch.zeros_like(weight_NA).flatten()
        dw1_EFL, dw3_EFL, dw2_ELF = torch.zeros_like(w1_EFL), torch.zeros_like(w3_EFL), torch.zeros_like(w2_ELF)
        for e, slot_R, token_R in _slices(ctx.plan, weight_NA.shape[1]):
            x_RL, dy_RL = z_NL[token_R], dout_NL[token_R]
            w1_FL, w3_FL, w2_LF = (w[e].to(x_RL.dtype) for w in (w1_EFL, w3_EFL, w2_ELF))
            p_R1 = weight_NA.flatten()[slot_R, None]
            gate_RF, up_RF = torch.mm(x_RL, w1_FL.T), torch.mm(x_RL, w3_FL.T)
            d_RF = torch.mm(dy_RL, w2_LF)
            with torch.enable_grad():
                gate_RF, up_RF = gate_RF.requires_grad_(), up_RF.requires_grad_()
                h_RF = _activate(gate_RF, up_RF, ctx.caps)
            dgate_RF, dup_RF = torch.autograd.grad(h_RF, (gate_RF, up_RF), (d_RF * p_R1).to(h_RF.dtype))
            h_RF = h_RF.detach()
            dweight_R[slot_R] = (h_RF.to(p_R1.dtype) * d_RF).sum(-1)
            dw2_ELF[e] = torch.mm(dy_RL.T, (h_RF * p_R1).to(dy_RL.dtype))
            dw1_EFL[e] = torch.mm(dgate_RF.T, x_RL)
            dw3_EFL[e] = torch.mm(dup_RF.T, x_RL)
            dz_NL.index_add_(0, token_R, torch.addmm(dgate_RF @ w1_FL, dup_RF, w3_FL).to(dz_NL.dtype))
        return dz_NL.to(z_NL.dtype), dweight_R.view_as(weight_NA), dw1_EFL, dw3_EFL, dw2_ELF, None, None


def _accumulator(z_NL: Tensor) -> torch.dtype:
    return torch.promote_types(z_NL.dtype, torch.float32)


def _slices(plan: DispatchPlan, active: int):
    """Yield (expert, its slots, their tokens) for each expert with rows."""
    offsets = plan.offset_E1.tolist()
    token_R = plan.slot_R // active
    for e, (begin, end) in enumerate(zip(offsets, offsets[1:])):
        if end > begin:
            yield e, plan.slot_R[begin:end], token_R[begin:end]


def _activate(gate_RF: Tensor, up_RF: Tensor, caps: tuple[float, float | None] | None) -> Tensor:
    return glu("swiglu")(gate_RF, up_RF) if caps is None else glu("situ")(gate_RF, up_RF, *caps)
