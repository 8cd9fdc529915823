"""Stable LatentMoE (report §2.3): experts in a half-width latent space, a norm after their sum, shared experts beside.

    s = sigmoid(W_r x)  in fp32;   chosen = top-k(s + b);   w = s / Σ_chosen s
    y = W_up RMSNorm( Σ_chosen w_e E_e(W_down x) ) + Shared(x)

The bias b only selects. It is moved between optimizer steps by the balancer (quantile balancing), never by gradients.
Without `latent_size` the experts work in the full width: the ordinary mixture of the K2-style baseline.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from perilune.config import ModelConfig, MoEConfig
from perilune.model.linear import Linear
from perilune.model.mlp import GatedMLP
from perilune.model.norm import RMSNorm
from perilune.ops.linear import linear
from perilune.ops.moe import (
    BALANCERS,
    Balancer,
    MixtureWeights,
    Routing,
    in_recompute,
    layer_decode,
    layer_obstacle,
    moe_decode,
    route,
    routed_experts,
    router_latent,
)
from perilune.ops.moe.decode import MAX_TOKENS


class Router(nn.Module):
    """Scores and routes in fp32; `bias` `[E]` is a buffer, so it has no gradient and is saved with the weights."""

    def __init__(self, cfg: ModelConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, cfg.hidden_size))
        self.register_buffer("bias", torch.zeros(moe.num_experts))

    def logits(self, x_ND: Tensor) -> Tensor:
        """Scores before the sigmoid, `[N, E]`, in fp32 (fp64 for fp64 tokens)."""
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        return linear(x_ND.to(wide), self.weight)

    def forward(self, x_ND: Tensor, logits_NE: Tensor | None = None) -> Routing:
        """Route `[N, D]` tokens, whose logits may be there already."""
        moe = self.moe
        return route(
            self.logits(x_ND) if logits_NE is None else logits_NE, self.bias, moe.experts_per_token,
            renormalize=moe.renormalize, scaling_factor=moe.routed_scaling_factor,
        )  # fmt: skip


class Experts(nn.Module):
    """Stacked expert weights: w1 (gate) and w3 (up) `[E, F, L]`, w2 (down) `[E, L, F]`."""

    def __init__(self, moe: MoEConfig, width: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(moe.num_experts, moe.expert_size, width))
        self.w3 = nn.Parameter(torch.empty(moe.num_experts, moe.expert_size, width))
        self.w2 = nn.Parameter(torch.empty(moe.num_experts, width, moe.expert_size))


def make_balancer(moe: MoEConfig) -> Balancer:
    """Build the balancer that the config names."""
    options = {"rate": moe.sign_update} if moe.balancer == "sign" else {}
    return BALANCERS[moe.balancer](moe.num_experts, moe.experts_per_token, ema=moe.balancer_ema, **options)


class LatentMoE(nn.Module):
    """Router, experts, shared experts.

    Attributes:
        balancer: rule that moves `router.bias`; the trainer calls its `update` once a step.
        counts_E: int64 tokens sent to each expert since the trainer last cleared it (training forwards only).
        experts_function: takes the arguments of `ops.moe.routed_experts` and stands in for it; `perilune.quant` puts one
            here that rounds weights and activations.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        moe = cfg.moe
        assert moe is not None, "the layer pattern has experts but the config has no moe"
        self.cfg, self.moe = cfg, moe
        width = moe.latent_size or cfg.hidden_size
        self.router = Router(cfg, moe)
        if moe.latent_size is not None:
            self.down_proj = Linear(cfg.hidden_size, width)
            self.up_proj = Linear(width, cfg.hidden_size)
            if moe.latent_norm:
                self.norm = RMSNorm(width, cfg.norm_eps)
        self.experts = Experts(moe, width)
        if moe.num_shared_experts:
            self.shared = GatedMLP(cfg, moe.num_shared_experts * moe.expert_size)
        self.balancer = make_balancer(moe)
        self.register_buffer("counts_E", torch.zeros(moe.num_experts, dtype=torch.int64), persistent=False)
        self.experts_function: Callable[..., Tensor] = routed_experts

    @torch.no_grad()
    def _observe(self, routing: Routing) -> None:
        if in_recompute():  # activation recomputation in a backward pass: these tokens were counted before
            return
        counts = routing.counts()
        self.balancer.observe(routing.scores_NE, routing.cutoff_N, None, counts, self.router.bias)
        self.counts_E += counts

    def _inputs(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """What the experts read, `[N, L]`, and the router's logits, `[N, E]`."""
        if self.moe.latent_size is None:
            return x_ND, self.router.logits(x_ND)
        weights = (self.down_proj.weight, self.router.weight) if type(self.down_proj) is Linear else ()
        if weights and router_latent.select(x_ND, *weights).implementation == "triton":
            return router_latent.project(x_ND, *weights)
        return self.down_proj(x_ND), self.router.logits(x_ND)

    def _routed(self, x_ND: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' outputs, `[N, L]`."""
        z_NL, logits_NE = self._inputs(x_ND)
        cfg, moe, experts = self.cfg, self.moe, self.experts
        caps = {"beta": cfg.situ_beta, "linear_beta": cfg.situ_linear_beta}
        plain = self.experts_function is routed_experts
        if plain and x_ND.shape[0] <= MAX_TOKENS and not torch.is_grad_enabled():
            return moe_decode(
                logits_NE, self.router.bias, z_NL, experts.w1, experts.w3, experts.w2,
                moe.experts_per_token, cfg.activation, **caps,
                renormalize=moe.renormalize, scaling_factor=moe.routed_scaling_factor,
            )  # fmt: skip
        routing = self.router(x_ND, logits_NE)
        if self.training and torch.is_grad_enabled():
            self._observe(routing)
        return self.experts_function(
            z_NL, routing.index_NA, routing.weight_NA, experts.w1, experts.w3, experts.w2, cfg.activation, **caps
        )

    def _weights(self) -> MixtureWeights | None:
        """All weights as they are; None if some module stands in for one of this file's."""
        latent = self.moe.latent_size is not None
        maps = [self.down_proj, self.up_proj] if latent else []
        shared = None
        if self.moe.num_shared_experts:
            maps += [self.shared.gate_proj, self.shared.up_proj, self.shared.down_proj]
            shared = (self.shared.gate_proj.weight, self.shared.up_proj.weight, self.shared.down_proj.weight)
        if any(type(module) is not Linear for module in maps) or self.experts_function is not routed_experts:
            return None
        experts = self.experts
        return MixtureWeights(
            self.router.weight, self.router.bias, self.down_proj.weight if latent else None, self.up_proj.weight if latent else None,
            (self.norm.weight, self.norm.eps) if latent and self.moe.latent_norm else None,
            (experts.w1, experts.w3, experts.w2), shared,
        )  # fmt: skip

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map `[B, T, D]` to `[B, T, D]`."""
        moe = self.moe
        x_ND = x_BTD.flatten(0, -2)
        if x_ND.dtype is torch.bfloat16 and not torch.is_grad_enabled():
            weights = self._weights()
            if weights is not None and layer_obstacle(x_ND, weights, moe.experts_per_token) is None:
                few = layer_decode(
                    x_ND, weights, moe.experts_per_token, self.cfg.activation, beta=self.cfg.situ_beta,
                    linear_beta=self.cfg.situ_linear_beta, renormalize=moe.renormalize, scaling_factor=moe.routed_scaling_factor,
                )  # fmt: skip
                return few.view_as(x_BTD)
        out = self._routed(x_ND)
        if moe.latent_size is not None:
            out = self.up_proj(self.norm(out) if moe.latent_norm else out)
        if moe.num_shared_experts:
            out = out + self.shared(x_ND)
        return out.view_as(x_BTD)
