"""Look inside a forward pass: routing loads, decay half-lives, depth-read weights, largest attention logits.

The model is not changed and keeps nothing: hooks live for one call.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from perilune.model.kda import KDA
from perilune.model.latent_moe import LatentMoE
from perilune.model.mla import GatedMLA
from perilune.model.residual import DepthRead, scored_sources
from perilune.model.transformer import Transformer
from perilune.ops.attnres import mix_weights
from perilune.ops.mla import max_logit
from perilune.ops.moe import Routing
from perilune.ops.segments import Segments


class Probe:
    """Collects, per layer, what passes through during one forward call (see `probe`)."""

    def __init__(self, model: Transformer, segments: Segments | None) -> None:
        self.segments = segments
        self.half_life: dict[int, Tensor] = {}
        self.max_logit: dict[int, Tensor] = {}
        self.reads: list[tuple[str, Tensor]] = []
        self.counts: dict[int, Tensor] = {}
        self.handles = []
        for index, block in enumerate(model.layers):
            if block.depth_reads:
                self._watch_read(f"{index}.mixer", block.mixer_read)
                self._watch_read(f"{index}.ffn", block.ffn_read)
            if isinstance(block.mixer, KDA):
                self.handles.append(block.mixer.register_forward_pre_hook(self._kda(index)))
            elif isinstance(block.mixer, GatedMLA):
                self.handles.append(block.mixer.register_forward_pre_hook(self._mla(index)))
            if isinstance(block.ffn, LatentMoE):
                self.handles.append(block.ffn.router.register_forward_hook(self._router(index)))
        if hasattr(model, "output_read"):
            self._watch_read("output", model.output_read)

    def _watch_read(self, site: str, read: DepthRead) -> None:
        def hook(module: DepthRead, args: tuple) -> None:
            weights = mix_weights(scored_sources(*args[:2]), module.score_weight, module.eps)
            self.reads.append((site, weights.flatten(0, -2).double().mean(0)))

        self.handles.append(read.register_forward_pre_hook(hook))

    def _kda(self, index: int):
        def hook(mixer: KDA, args: tuple) -> None:
            rate = -mixer.log_decay(args[0]).double().mean((0, 1))
            self.half_life[index] = math.log(2) / rate.clamp(min=1e-12)

        return hook

    def _mla(self, index: int):
        def hook(mixer: GatedMLA, args: tuple) -> None:
            q = torch.cat(mixer.queries(args[0]), dim=-1)
            keys, _ = mixer.expand(*mixer.latents(args[0]))
            self.max_logit[index] = max_logit(q, keys, mixer.scale, self.segments)

        return hook

    def _router(self, index: int):
        def hook(router: torch.nn.Module, args: tuple, routing: Routing) -> None:
            self.counts[index] = torch.bincount(routing.index_NA.flatten(), minlength=routing.scores_NE.shape[-1])

        return hook


@torch.no_grad()
def probe(model: Transformer, ids_BT: Tensor, segments: Segments | None = None) -> dict[str, Tensor | list[str]]:
    """Run the model once on `[B, T]` ids and return what its parts did. Keys without a layer of the kind are left out.

    Returns:
        routing_counts `[moe layers, E]` int64 tokens sent to each expert, routing_layers, router_bias `[moe layers, E]`;
        kda_half_life `[kda layers, H, K]` in tokens: ln 2 over the mean decay rate, kda_layers;
        attnres_weights `[sites, M]`: mean weight of each source (bank rows first, running sum last; NaN = no such
        source), attnres_sites: "L.mixer", "L.ffn", "output"; mla_max_logit `[mla layers, H]`, mla_layers.
    """
    was_training = model.training
    model.eval()
    seen = Probe(model, segments)
    try:
        model(ids_BT, segments=segments, logits="none")
    finally:
        for handle in seen.handles:
            handle.remove()
        model.train(was_training)
    found: dict[str, Tensor | list[str]] = {}
    for key, layers, values in (
        ("routing_counts", "routing_layers", seen.counts),
        ("kda_half_life", "kda_layers", seen.half_life),
        ("mla_max_logit", "mla_layers", seen.max_logit),
    ):
        if values:
            found[key] = torch.stack(list(values.values()))
            found[layers] = torch.tensor(list(values))
    if seen.counts:
        found["router_bias"] = torch.stack([layer.router.bias.clone() for layer in model.moe_layers()])
    if seen.reads:
        weights = torch.full((len(seen.reads), max(len(w) for _, w in seen.reads)), torch.nan, dtype=torch.float64)
        for row, (_, w) in enumerate(seen.reads):
            weights[row, : len(w)] = w
        found["attnres_weights"] = weights
        found["attnres_sites"] = [site for site, _ in seen.reads]
    return found
