"""One decoder layer: read over depth, norm, mixer, write; read, norm, feed-forward, write (report Fig. 2)."""

from __future__ import annotations

from torch import nn

from perilune.config import ModelConfig
from perilune.model.kda import KDA, GatedDeltaNet
from perilune.model.latent_moe import LatentMoE
from perilune.model.mla import GatedMLA
from perilune.model.mlp import GatedMLP
from perilune.model.norm import RMSNorm
from perilune.model.residual import DepthRead, Stream
from perilune.model.softmax_attention import SoftmaxAttention
from perilune.model.state import LayerState
from perilune.ops.segments import Segments

MIXERS: dict[str, type[nn.Module]] = {"kda": KDA, "gdn": GatedDeltaNet, "mla": GatedMLA, "softmax": SoftmaxAttention}


class Block(nn.Module):
    """Layer `index` of the model."""

    def __init__(self, cfg: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.depth_reads = cfg.residual != "plain"
        if self.depth_reads:
            self.mixer_read = DepthRead(cfg.hidden_size, cfg.norm_eps)
            self.ffn_read = DepthRead(cfg.hidden_size, cfg.norm_eps)
        self.mixer_norm = RMSNorm(cfg.hidden_size, cfg.norm_eps)
        self.mixer = MIXERS[cfg.layer_mixers[index]](cfg)
        self.ffn_norm = RMSNorm(cfg.hidden_size, cfg.norm_eps)
        self.ffn = GatedMLP(cfg, cfg.dense_size) if cfg.layer_ffns[index] == "dense" else LatentMoE(cfg)

    def forward(
        self, stream: Stream, state: LayerState | None, segments: Segments | None, past: list[int] | None
    ) -> None:
        """Read from and write to `stream`; `state` is updated in place."""
        x = stream.read(self.mixer_read if self.depth_reads else None, self.mixer_norm)
        out, _ = self.mixer(x, state, segments, past)
        stream.add_mixer(self.index, out)
        x = stream.read(self.ffn_read if self.depth_reads else None, self.ffn_norm)
        stream.add_ffn(self.ffn(x))
