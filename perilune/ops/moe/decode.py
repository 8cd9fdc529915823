"""The experts of a few tokens without gradients, as matrix-vector products: what a decode step runs.

With one token there is nothing to group: each chosen expert's matrices are read once, and the time is that of the
reading. `moe_decode` also routes, so that a step costs one call. A token's result does not depend on which other tokens
share the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.choice import Choice, forced
from perilune.ops.moe import native

MAX_TOKENS = 8  # beyond this several tokens meet at an expert, and a matrix product reads its weights once for all


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
