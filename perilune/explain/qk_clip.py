"""QK-clip: shrink a head's weights when its logits pass the bound."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from perilune.explain.chart import Bars
from perilune.explain.explanation import Explanation
from perilune.explain.subject import Subject
from perilune.model.mla import GatedMLA
from perilune.ops.mla import max_logit
from perilune.optim.qk_clip import clip_

TAU = 100.0


def explain(subject: Subject) -> Explanation:
    """Blow up half the heads of an MLA layer's query, clip, and look at the logits and at what did not change."""
    index, mixer = list(subject.mixers(GatedMLA).items())[-1]
    layer = copy.deepcopy(mixer).double()
    heads = layer.mla.num_heads
    x_BTD = torch.randn(1, 64, subject.cfg.hidden_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    natural = largest(layer, x_BTD)
    query = query_weight(layer)
    factors_H = torch.ones(heads, dtype=torch.float64)
    factors_H[: max(1, heads // 2)] = 4 * TAU / natural[: max(1, heads // 2)]
    with torch.no_grad():
        query.view(heads, layer.mla.qk_head_dim, -1).mul_(factors_H[:, None, None])
    values = layer.expand(*layer.latents(x_BTD))[1].detach().clone()
    before = largest(layer, x_BTD)
    scaled = int(clip_(query, layer.kv_b_proj.weight, before, TAU, layer.mla))
    after = largest(layer, x_BTD)
    moved = float((layer.expand(*layer.latents(x_BTD))[1] - values).abs().max().detach())
    return Explanation(
        name="qk_clip",
        title="QK-clip",
        source="K3 report §3.3 (weight clipping as in Kimi K2); the bound 100 is K2's",
        formula=(
            "S_h = largest logit of head h over the step's tokens,   γ = min(1, τ / S_h)",
            "content rows of W_q and W_k of head h  ← √γ ·",
            "shared-slice rows of W_q of head h     ← γ ·        the key of that slice belongs to all heads",
        ),
        unusual=(
            "The weights are clipped after the optimizer's step, not the logits in the forward: the attention op stays plain.",
            "Only heads above the bound are touched; value rows and the shared key rows never are.",
            "KDA normalises its queries and keys, so only MLA layers need it.",
        ),
        reference=clip_,
        findings=[
            f"{scaled} of {heads} heads were above τ = {TAU:g}; their largest logit went from {float(before.max()):.1f} to {float(after.max()):.4f}.",
            f"Heads below the bound changed by {float((after - before)[before <= TAU].abs().max()) if bool((before <= TAU).any()) else 0.0:.1e}.",
            f"Values changed by {moved:.1e}.",
        ],
        numbers={
            "tau": TAU,
            "scaled_heads": scaled,
            "before": before.tolist(),
            "after": after.tolist(),
            "value_change": moved,
        },
        charts=[
            Bars(
                title=f"Largest logit of each head, layer {index}",
                categories=[f"head {i}" for i in range(heads)],
                groups=[
                    ("as it is", natural.tolist()),
                    ("query made too large", before.tolist()),
                    ("after the clip", after.tolist()),
                ],
                y_label="max logit",
                y_log=True,
                horizontals=[(TAU, "τ")],
                caption="Clipped heads land exactly on the bound for the same tokens; the others do not move.",
            )
        ],
        next=("perilune explain mla", "perilune explain muon"),
    )


def query_weight(layer: GatedMLA) -> Tensor:
    """The query projection that is cut into heads."""
    return layer.q_proj.weight if layer.mla.q_lora_rank is None else layer.q_b_proj.weight


@torch.no_grad()
def largest(layer: GatedMLA, x_BTD: Tensor) -> Tensor:
    """Largest pre-softmax logit of each head, `[H]`."""
    q = torch.cat(layer.queries(x_BTD), dim=-1)
    keys, _ = layer.expand(*layer.latents(x_BTD))
    return max_logit(q, keys, layer.scale).double()
