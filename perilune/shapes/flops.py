"""Model FLOPs: what the mathematics needs, not what an implementation spends (recomputation is not counted).

A multiply-add counts 2. Backward counts twice the forward. Only the experts that a token visits count. The KDA
recurrence counts its three K×V products a token and head (predict, write, read), independent of any chunking.
"""

from __future__ import annotations

from perilune.config import ModelConfig, VisionConfig
from perilune.shapes.counts import mixer_parameters, moe_parameters


def read_sources(cfg: ModelConfig) -> int:
    """Sources summed over all depth reads of a forward pass; 0 with plain residuals."""
    if cfg.residual == "plain":
        return 0
    if cfg.residual == "full_sublayer":
        return sum(4 * layer + 3 for layer in range(cfg.num_layers)) + 2 * cfg.num_layers + 1
    block = 1 if cfg.residual == "full" else cfg.attn_res_block_layers
    total = 0
    for layer in range(cfg.num_layers):
        before = -(-layer // block)
        after = before + (layer % block == 0)
        total += before + 1 + after + 1
    return total + -(-cfg.num_layers // block) + 1


def forward_flops_per_token(cfg: ModelConfig, seq_len: int) -> float:
    """FLOPs of one token's forward pass, averaged over a causal window of `seq_len` tokens."""
    width = cfg.hidden_size
    flops = 2.0 * cfg.vocab_size * width + 4.0 * width * read_sources(cfg)
    for kind, ffn in zip(cfg.layer_mixers, cfg.layer_ffns, strict=True):
        flops += 2.0 * mixer_parameters(cfg, kind)
        if kind in ("kda", "gdn"):
            flops += 6.0 * cfg.kda.num_heads * cfg.kda.head_dim * cfg.kda.value_dim
        else:
            heads, key, value = (
                (cfg.mla.num_heads, cfg.mla.qk_head_dim, cfg.mla.v_head_dim)
                if kind == "mla"
                else (cfg.softmax.num_heads, cfg.softmax.head_dim, cfg.softmax.head_dim)
            )
            flops += heads * (key + value) * (seq_len + 1)  # 2 · (key + value) · mean visible length (seq_len + 1) / 2
        if ffn == "dense":
            flops += 6.0 * width * cfg.dense_size
        else:
            flops += 2.0 * moe_parameters(width, cfg.moe, cfg.moe.experts_per_token)
    return flops


def train_flops_per_token(cfg: ModelConfig, seq_len: int) -> float:
    """FLOPs of one token's forward and backward pass."""
    return 3.0 * forward_flops_per_token(cfg, seq_len)


def vision_flops(vision: VisionConfig, text_width: int, grid: tuple[int, int, int]) -> float:
    """FLOPs of one image's or clip's forward pass through tower and projector; attention is that of all pairs of patches.

    Args:
        vision: the tower.
        text_width: width of the text model.
        grid: frames, rows and columns of patches.
    """
    patches, tokens = grid[0] * grid[1] * grid[2], (grid[1] // vision.merge) * (grid[2] // vision.merge)
    width, attention = vision.hidden_size, vision.num_heads * vision.head_dim
    block = 2.0 * width * (4 * attention + 2 * vision.mlp_size) + 4.0 * attention * patches
    merged = vision.merge**2 * width
    embed = 2.0 * 3 * vision.patch_size**2 * width
    return patches * (embed + vision.num_layers * block) + tokens * 2.0 * merged * (merged + text_width)
