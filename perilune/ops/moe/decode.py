"""The experts of a few tokens without gradients, as matrix-vector products: what a decode step runs.

A decode step's time is that of reading weights: each chosen expert's matrices are read once, for all tokens that chose
it. `moe_decode` also routes, so that a step costs one call; `mlp_decode` is a gated MLP as the one expert that every token
visits. A token's result does not depend on which other tokens share the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.choice import Choice, forced
from perilune.ops.moe import native

MAX_TOKENS = 8  # beyond this a matrix product by BLAS is faster


def select(z_NL: Tensor, w1_EFL: Tensor) -> Choice:
    """Return whether `moe_decode` runs its C kernel ("native") or router and experts separately ("torch"), and why."""
    if (wanted := forced()) in ("torch", "reference"):
        return Choice("torch", f"asked for {wanted}")
    reason = native.why_not(z_NL, w1_EFL, dtypes=(torch.float32, torch.bfloat16))
    return Choice("torch", reason) if reason else Choice("native", "one C call for router and experts")


def experts_decode(
    z_NL: Tensor,
    index_NA: Tensor,
    weight_NA: Tensor,
    w1_EFL: Tensor,
    w3_EFL: Tensor,
    w2_ELF: Tensor,
    caps: tuple[float, float | None] | None,
) -> Tensor:
    """`experts.routed_experts` for a few tokens, native only; `caps` = (beta, linear_beta) of SiTU, None = SwiGLU."""
    return native.experts_decode(z_NL, index_NA, weight_NA, w1_EFL, w3_EFL, w2_ELF, caps)


def moe_decode(
    logits_NE: Tensor,
    bias_E: Tensor,
    z_NL: Tensor,
    w1_EFL: Tensor,
    w3_EFL: Tensor,
    w2_ELF: Tensor,
    k: int,
    activation: str = "situ",
    *,
    beta: float = 4.0,
    linear_beta: float | None = 25.0,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
) -> Tensor:
    """`router.route`, then `experts.routed_experts`, for a few tokens without gradients.

    Args:
        logits_NE: `[N, E]` router logits, fp32.
        bias_E: `[E]` selection bias, fp32.
        z_NL: `[N, L]` tokens, fp32 or bf16.
        w1_EFL: `[E, F, L]` gate weights, fp32 or bf16; `w3_EFL` and `w2_ELF` `[E, L, F]` alike.
        k: active experts A, 1 <= k < E.

    Returns:
        `[N, L]` in the tokens' dtype.

    Raises:
        ConfigError: `k` leaves no cutoff.
    """
    if not 1 <= k < logits_NE.shape[1]:
        raise ConfigError(
            f"{k} active experts of {logits_NE.shape[1]}; allowed: 1 to {logits_NE.shape[1] - 1}; lower top-k"
        )
    if select(z_NL, w1_EFL).implementation == "native" and z_NL.shape[0] <= MAX_TOKENS:
        caps = (float(beta), linear_beta) if activation == "situ" else None
        return native.moe_decode(
            logits_NE, bias_E, z_NL, w1_EFL, w3_EFL, w2_ELF, k, caps, renormalize, scaling_factor
        )  # fmt: skip
    from perilune.ops.moe.experts import routed_experts  # experts.py imports this module
    from perilune.ops.moe.router import route

    with torch.no_grad():
        routing = route(logits_NE, bias_E, k, renormalize=renormalize, scaling_factor=scaling_factor)
        return routed_experts(
            z_NL,
            routing.index_NA,
            routing.weight_NA,
            w1_EFL,
            w3_EFL,
            w2_ELF,
            activation,
            beta=beta,
            linear_beta=linear_beta,
        )


def mlp_decode(
    x_ND: Tensor,
    gate_FD: Tensor,
    up_FD: Tensor,
    down_DF: Tensor,
    activation: str = "situ",
    *,
    beta: float = 4.0,
    linear_beta: float | None = 25.0,
) -> Tensor | None:
    """W_down · act(W_gate x, W_up x) of at most `MAX_TOKENS` tokens in one C call, without gradients.

    Returns:
        `[N, D]` in the tokens' dtype, or None where `select` finds no C kernel for these operands.
    """
    if x_ND.shape[0] > MAX_TOKENS or select(x_ND, gate_FD).implementation != "native":
        return None
    caps = (float(beta), linear_beta) if activation == "situ" else None
    return native.mlp_decode(x_ND, gate_FD, up_FD, down_DF, caps)
