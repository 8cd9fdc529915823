"""The experts of a few tokens without gradients, as matrix-vector products: what a decode step runs.

A decode step's time is that of reading weights: each chosen expert's matrices are read once, for all tokens that chose
it. `moe_decode` also routes, so that a step costs one call; `mlp_decode` is a gated MLP as the one expert that every token
visits. A token's result does not depend on which other tokens share the call.

Implementations: "native" (C, on the CPU), "cuda" (bfloat16 on Hopper, up to 32 tokens), "triton" (other CUDA devices and types),
"torch" (router and experts as for many tokens). `layer_decode` is the whole feed-forward layer by the "cuda" kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.choice import Choice, forced
from perilune.ops.few_rows import experts as few_experts
from perilune.ops.few_rows import kernels as few_rows
from perilune.ops.few_rows.cuda.mixture import mixture
from perilune.ops.few_rows.cuda.project import project
from perilune.ops.moe import native
from perilune.ops.triton import available

MAX_TOKENS = 8  # beyond this a matrix product by BLAS is faster
# On a GPU each token reads its experts' matrices for itself. Products of tokens grouped by expert take over where many pairs share
# an expert (measured on one H200 with 128 experts, 16 a token: 1.05 times as fast for 1 token, 0.71 for 8), unless so few
# bytes are read that their further launches, about 15 us, weigh more.
SHARED_PAIRS = 4  # experts for each (token, expert) pair, above which hardly any two pairs share one
LAUNCH_BYTES = 64e6
MAX_MLP_TOKENS = 4  # of a gated MLP on a GPU: each token reads the matrices again, if only from the L2 cache


_CUDA = Choice("cuda", "three launches, each chosen expert read once for all of its tokens")


def select(z_NL: Tensor, w1_EFL: Tensor) -> Choice:
    """Return whether `moe_decode` runs kernels for a few tokens or router and experts as for many ("torch"), and why."""
    if (wanted := forced()) in ("torch", "reference"):
        return Choice("torch", f"asked for {wanted}")
    reason = None
    if wanted == "cuda" or z_NL.is_cuda and wanted is None:
        reason = few_rows.why_not(z_NL, w1_EFL)
        if reason is None:
            return _CUDA
        if wanted == "cuda":
            return Choice("torch", f"cuda was asked for, but {reason}")
    if (choice := available.choose(z_NL)) is not None:
        if choice.implementation == "triton" and w1_EFL.dtype not in available.DTYPES:
            return Choice("torch", f"plain torch: the kernels do not read weights in {str(w1_EFL.dtype)[6:]}")
        return choice
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
    few = z_NL.shape[0] <= MAX_TOKENS
    implementation = select(z_NL, w1_EFL).implementation
    caps = (float(beta), linear_beta) if activation == "situ" else None
    if implementation == "cuda" and few_experts.why_not(w1_EFL, w3_EFL, w2_ELF, k) is None:
        outputs = few_experts.experts(
            logits_NE, bias_E, z_NL, w1_EFL, w3_EFL, w2_ELF, k, caps, renormalize, scaling_factor
        )  # fmt: skip
        return few_experts.combined(outputs)[0]
    if implementation == "native" and few:
        return native.moe_decode(
            logits_NE, bias_E, z_NL, w1_EFL, w3_EFL, w2_ELF, k, caps, renormalize, scaling_factor
        )  # fmt: skip
    from perilune.ops.moe.experts import routed_experts  # experts.py imports this module
    from perilune.ops.moe.router import route

    with torch.no_grad():
        routing = route(logits_NE, bias_E, k, renormalize=renormalize, scaling_factor=scaling_factor)
        if few and _triton(implementation, z_NL) and _apart(len(z_NL) * k, w1_EFL):
            from perilune.ops.moe import triton_decode

            return triton_decode.experts(z_NL, routing.index_NA, routing.weight_NA, w1_EFL, w3_EFL, w2_ELF, caps)
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


def _triton(implementation: str, z_NL: Tensor) -> bool:
    """Whether Triton's kernels run: they also take what the CUDA kernels leave of the calls they were chosen for."""
    return (
        implementation == "triton" or implementation == "cuda" and available.obstacle(z_NL.device, z_NL.dtype) is None
    )


def _apart(pairs: int, w1_EFL: Tensor) -> bool:
    """Whether these (token, expert) pairs are better multiplied one by one than grouped by expert."""
    return pairs * SHARED_PAIRS <= len(w1_EFL) or pairs * 3 * w1_EFL[0].nbytes <= LAUNCH_BYTES


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
    """W_down · act(W_gate x, W_up x) of a few tokens by the kernels of this file, without gradients.

    Returns:
        `[N, D]` in the tokens' dtype, or None where `select` finds no kernel or there are too many tokens for it.
    """
    implementation = select(x_ND, gate_FD).implementation
    caps = (float(beta), linear_beta) if activation == "situ" else None
    if implementation == "cuda" and few_rows.why_not(x_ND, gate_FD, up_FD) is None:
        if few_rows.unfit(down_DF, len(gate_FD)) is None:
            hidden_NF = mixture(x_ND, None, None, (gate_FD, up_FD), caps)[2]
            assert hidden_NF is not None, "hidden values were asked for"
            return project(hidden_NF, [down_DF])[0]
    if implementation == "native" and x_ND.shape[0] <= MAX_TOKENS:
        return native.mlp_decode(x_ND, gate_FD, up_FD, down_DF, caps)
    if _triton(implementation, x_ND) and x_ND.shape[0] <= MAX_MLP_TOKENS:
        from perilune.ops.moe import triton_decode

        return triton_decode.experts(x_ND, None, None, gate_FD[None], up_FD[None], down_DF[None], caps)
    return None


class MixtureWeights(NamedTuple):
    """Weights of a feed-forward layer with experts.

    Attributes:
        router_ED, bias_E: the router's matrix and selection bias, float32.
        down_LD, up_DL: into and out of the experts' latent space, or None of both.
        norm: (weight `[L]`, eps) of the RMSNorm of the experts' sum, or None.
        experts: w1 `[E, F, L]`, w3 `[E, F, L]`, w2 `[E, L, F]`.
        shared: gate, up `[S, D]` and down `[D, S]` of the shared experts, or None.
    """

    router_ED: Tensor
    bias_E: Tensor
    down_LD: Tensor | None
    up_DL: Tensor | None
    norm: tuple[Tensor, float] | None
    experts: tuple[Tensor, Tensor, Tensor]
    shared: tuple[Tensor, Tensor, Tensor] | None


def layer_obstacle(x_ND: Tensor, weights: MixtureWeights, k: int) -> str | None:
    """Why `layer_decode` does not take these operands; None if it does."""
    if forced() not in (None, "cuda") or x_ND.is_cpu and forced() is None:
        return "the kernels of few rows were not asked for, or the tokens are on a CPU"
    maps = [w for w in (weights.down_LD, *(weights.shared or ())[:2]) if w is not None]
    if (reason := few_rows.why_not(x_ND, *maps) or few_experts.why_not(*weights.experts, k)) is not None:
        return reason
    outward = [(weights.up_DL, weights.experts[0].shape[2])]
    if weights.shared is not None:
        outward.append((weights.shared[2], len(weights.shared[0])))
    for matrix, width in outward:
        if matrix is not None and (reason := few_rows.unfit(matrix, width)) is not None:
            return reason
    if weights.norm is not None and weights.norm[0].dtype is not torch.float32:
        return "the norm's weight is not float32"
    return few_rows.unfit(weights.router_ED, x_ND.shape[1], torch.float32)


def layer_decode(
    x_ND: Tensor,
    weights: MixtureWeights,
    k: int,
    activation: str = "situ",
    *,
    beta: float = 4.0,
    linear_beta: float | None = 25.0,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
) -> Tensor:
    """A whole feed-forward layer with experts for a few tokens, without gradients, in four launches.

    Latents, logits and the shared experts' hidden values are the first, routes and hidden values the second, outputs the third,
    their normalised sum and both ways back into the model's width the last; two more for many tokens. `layer_obstacle` has nothing to say against the operands.

    Returns:
        `[N, D]` in the tokens' dtype.
    """
    caps = (float(beta), linear_beta) if activation == "situ" else None
    unit = None if weights.shared is None else weights.shared[:2]
    z_NL, logits_NE, hidden_NS = mixture(x_ND, weights.down_LD, weights.router_ED, unit, caps)
    assert logits_NE is not None, "logits were asked for"
    outputs = few_experts.experts(
        logits_NE, weights.bias_E, x_ND if z_NL is None else z_NL, *weights.experts, k, caps, renormalize, scaling_factor
    )  # fmt: skip
    shared = None if hidden_NS is None or weights.shared is None else (hidden_NS, weights.shared[2])
    if weights.up_DL is not None:
        return few_experts.outward(outputs, weights.up_DL, weights.norm, shared)
    sum_ND, _ = few_experts.combined(outputs)
    return sum_ND if shared is None else sum_ND + project(shared[0], [shared[1]])[0]
