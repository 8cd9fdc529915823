"""Attention residuals: each site attends over depth instead of taking the running sum."""

from __future__ import annotations

import numpy as np
import torch

from perilune.errors import RequestError
from perilune.explain.chart import Heatmap
from perilune.explain.depth import running_sum_last, site_name, source_names
from perilune.explain.explanation import Explanation
from perilune.explain.subject import Subject, numbered
from perilune.model.probe import probe
from perilune.model.residual import DepthRead, scored_sources
from perilune.ops.attnres import mix_weights
from perilune.ops.attnres.reference import mix_weights_reference


def explain(subject: Subject) -> Explanation:
    """Mean weights of every site, and the output site's weights token by token."""
    cfg = subject.cfg
    if cfg.residual == "plain":
        raise RequestError(
            f"{subject.label} has a plain residual; train with --model.residual block to see weights over depth"
        )
    seen = probe(subject.model, subject.ids_BT)
    summed = cfg.residual in ("block", "full")
    weights = np.asarray(seen["attnres_weights"])
    weights = running_sum_last(weights) if summed else weights
    sites = [site_name(site) for site in seen["attnres_sites"]]
    sources = source_names(weights.shape[1], cfg.attn_res_block_layers if summed else None, cfg.residual)
    per_token = output_weights(subject)
    named = source_names(per_token.shape[1], cfg.attn_res_block_layers if summed else None, cfg.residual)
    entropy = -np.nansum(per_token * np.log(np.maximum(per_token, 1e-30)), axis=1)
    even = float(np.log(per_token.shape[1]))
    charts = [
        Heatmap(
            title="Which earlier outputs each site reads",
            frames=[("mean over the text", weights)],
            rows=sites,
            columns=sources,
            x_label="source",
            y_label="site",
            value_label="weight",
            limits=(0.0, 1.0),
            show_values=weights.size <= 150,
            caption="Rows sum to 1. Even rows are how training starts; a sharp row is a learnt short cut over depth.",
        ),
        Heatmap(
            title="The output site, token by token",
            frames=[("", per_token.T)],
            rows=named,
            columns=numbered(subject.tokens),
            x_label="token",
            y_label="source",
            value_label="weight",
            limits=(0.0, 1.0),
            caption="Every token mixes depth for itself: the query is learnt, the keys are the token's own outputs.",
        ),
    ]
    return Explanation(
        name="attnres",
        title="Attention residuals (AttnRes)",
        source="K3 report §2.2, Eq. 8–10",
        formula=(
            "sources of a site:  B₀ = embedding, B₁ … Bₙ₋₁ = sums of finished blocks, P = running sum of the open block",
            "sᵢ = ⟨w, RMSNorm(vᵢ)⟩              w is one learnt vector a site",
            "h = Σᵢ softmax(s)ᵢ vᵢ              the values are not normalised",
            "at a block's first layer:  push P to the bank, then P ← that layer's output",
        ),
        unusual=(
            "There is no residual stream through all layers: the running sum restarts at every block.",
            "The query does not depend on the token, so the scores of all sites of a block against finished blocks are one product.",
            "Only block sums are kept (9 sources in K3's 93 layers), which keeps memory and pipeline traffic at O(blocks · width).",
            "Queries start at zero: every site begins as the plain mean of its sources.",
        ),
        reference=mix_weights_reference,
        findings=[
            f"{len(sites)} sites read up to {weights.shape[1]} sources.",
            f"At the output, the weights' entropy is {entropy.mean():.3f} nats on average; even weights would have {even:.3f}.",
            f"Between tokens, one source's output weight varies by {float((per_token.max(0) - per_token.min(0)).max()):.3f}.",
            *subject.only_if_trained(),
        ],
        numbers={
            "sites": sites,
            "sources": sources,
            "weights": [[None if np.isnan(value) else float(value) for value in row] for row in weights],
            "output_entropy_nats": float(entropy.mean()),
            "even_entropy_nats": even,
        },
        charts=charts,
        next=(
            "perilune ablate --preset nano --vary residual=plain,full,block --seeds 3",
            "perilune explain latent_moe",
        ),
    )


@torch.no_grad()
def output_weights(subject: Subject) -> np.ndarray:
    """Weights of the output site for each token, `[T, M]`."""
    found: list[torch.Tensor] = []

    def hook(read: DepthRead, args: tuple) -> None:
        found.append(mix_weights(scored_sources(*args[:2]), read.score_weight, read.eps))

    handle = subject.model.output_read.register_forward_pre_hook(hook)
    try:
        subject.model(subject.ids_BT, logits="none")
    finally:
        handle.remove()
    return found[0][0].double().numpy()
