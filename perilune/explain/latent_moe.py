"""Stable LatentMoE: many small experts in a narrower space, a norm after their sum."""

from __future__ import annotations

import numpy as np
import torch

from perilune.errors import RequestError
from perilune.explain.chart import Bars, Heatmap
from perilune.explain.explanation import Explanation
from perilune.explain.subject import Subject, numbered
from perilune.model.latent_moe import LatentMoE
from perilune.ops.moe import Routing


def explain(subject: Subject) -> Explanation:
    """Experts and weights that each token of the text gets, and the load this makes."""
    cfg, moe = subject.cfg, subject.cfg.moe
    if not subject.model.moe_layers() or moe is None:
        raise RequestError(f"{subject.label} has no expert layer; its feed-forward layers are all dense")
    routings = route_text(subject)
    layers = list(routings)
    middle = layers[len(layers) // 2]
    frames = [(f"layer {layer}", weights_of(routings[layer], moe.num_experts).T) for layer in layers]
    frames = [*[frame for frame in frames if frame[0] != f"layer {middle}"], frames[layers.index(middle)]]
    loads = {
        layer: np.bincount(routings[layer].index_NA.flatten().numpy(), minlength=moe.num_experts) for layer in layers
    }
    ratio = {layer: float(load.max() / load.mean()) for layer, load in loads.items()}
    width = moe.latent_size or cfg.hidden_size
    one = 3 * width * moe.expert_size
    charts = [
        Heatmap(
            title="Which experts each token visits, and how much of each",
            frames=frames,
            rows=[f"expert {i}" for i in range(moe.num_experts)],
            columns=numbered(subject.tokens),
            x_label="token",
            y_label="expert",
            value_label="weight",
            limits=(0.0, 1.0),
            caption=f"Each column has {moe.experts_per_token} entries that sum to 1; equal tokens in different places may go to different experts.",
        ),
        Bars(
            title=f"Load of the experts of layer {middle} on this text",
            categories=[str(i) for i in range(moe.num_experts)],
            groups=[(f"layer {middle}", loads[middle].tolist())],
            y_label="tokens",
            show_values=False,
            horizontals=[(float(loads[middle].mean()), "even load")],
            caption="A short text cannot be spread evenly; the balancer evens the load over a whole step of training.",
        ),
    ]
    return Explanation(
        name="latent_moe",
        title="Stable LatentMoE",
        source="K3 report §2.3, Eq. 11 and 13",
        formula=(
            "s = σ(W_r x) in fp32          chosen = top-k(s + b)          w = s / Σ_chosen s",
            "u = Σ_chosen w_e · W₂ᵉ SiTU(W₁ᵉ z, W₃ᵉ z)         z = W↓ x, narrower than the model",
            "y = W↑ RMSNorm(u) + Shared(x)",
        ),
        unusual=(
            "Experts work in a latent space of half the width, so the same weights buy about twice as many experts.",
            "The norm stands after the weighted sum and before W↑: without it four products in a row let activations explode.",
            "The bias b decides who is chosen and never enters the weights; no gradient and no auxiliary loss touch it.",
            "The router reads the full-width x, not the latent z; shared experts see every token.",
        ),
        reference=LatentMoE.forward,
        findings=[
            f"{moe.experts_per_token} of {moe.num_experts} experts a token; each has {one:,} weights in a space of {width} (model width {cfg.hidden_size}).",
            f"A layer's routed weights: {one * moe.num_experts:,}, of which a token uses {one * moe.experts_per_token:,}.",
            *(
                f"Layer {layer}: busiest expert ÷ mean load {ratio[layer]:.2f} on these {subject.ids_BT.shape[1]} tokens."
                for layer in layers[:4]
            ),
            *subject.only_if_trained(),
        ],
        numbers={
            "experts": moe.num_experts,
            "experts_per_token": moe.experts_per_token,
            "latent_size": width,
            "expert_parameters": one,
            "layers": {
                str(layer): {
                    "index": routings[layer].index_NA.tolist(),
                    "weight": routings[layer].weight_NA.tolist(),
                    "max_over_mean": ratio[layer],
                }
                for layer in layers
            },
        },
        charts=charts,
        next=("perilune explain quantile_balancing", "perilune explain situ"),
    )


@torch.no_grad()
def route_text(subject: Subject) -> dict[int, Routing]:
    """The routing of every token of the text, by layer."""
    found: dict[int, Routing] = {}
    handles = []
    for index, block in enumerate(subject.model.layers):
        if isinstance(block.ffn, LatentMoE):

            def hook(ffn: LatentMoE, args: tuple[torch.Tensor], out: torch.Tensor, index: int = index) -> None:
                found[index] = ffn.router(args[0].flatten(0, -2))

            handles.append(block.ffn.register_forward_hook(hook))
    try:
        subject.model(subject.ids_BT, logits="none")
    finally:
        for handle in handles:
            handle.remove()
    return found


def weights_of(routing: Routing, experts: int) -> np.ndarray:
    """Mixing weights as a matrix `[tokens, experts]`, NaN where an expert was not chosen."""
    matrix = np.full((routing.index_NA.shape[0], experts), np.nan)
    np.put_along_axis(matrix, routing.index_NA.numpy(), routing.weight_NA.double().numpy(), axis=1)
    return matrix
