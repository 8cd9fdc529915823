"""Named configurations. Each is a function, so a change is `dataclasses.replace(nano(), …)`.

`PRESETS` holds model shapes, `TRAINING` the runs that fit them. Sizes of the published models are facts (K3 report
Table 1, released configurations); all other sizes are our choice.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace

from perilune.config.model import KDAConfig, MLAConfig, ModelConfig, MoEConfig, VisionConfig
from perilune.config.train import DataConfig, EvalConfig, OptimConfig, StageConfig, TrainConfig, VisionDataConfig
from perilune.errors import ConfigError


def tiny() -> ModelConfig:
    """About 0.2 M parameters: every mechanism in four layers, for tests."""
    return ModelConfig(
        vocab_size=512, hidden_size=64, num_layers=4, attn_res_block_layers=2, dense_size=128,
        kda=KDAConfig(num_heads=2, head_dim=16),
        mla=MLAConfig(num_heads=2, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
        moe=MoEConfig(num_experts=8, experts_per_token=2, num_shared_experts=1, expert_size=32, latent_size=32),
    )  # fmt: skip


def nano() -> ModelConfig:
    """The demo: minutes on two CPU cores."""
    return ModelConfig(
        vocab_size=4096, hidden_size=128, num_layers=4, attn_res_block_layers=2, dense_size=384, init_range=0.006,
        kda=KDAConfig(num_heads=2, head_dim=64),
        mla=MLAConfig(num_heads=4, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
        moe=MoEConfig(num_experts=16, experts_per_token=4, num_shared_experts=1, expert_size=64, latent_size=64),
    )  # fmt: skip


def nano_vision() -> ModelConfig:
    """`nano` with a vision tower and projector of 0.24 M parameters for pictures of 56 pixels: the demo with images."""
    return replace(
        nano(),
        vision=VisionConfig(hidden_size=64, num_layers=3, num_heads=4, head_dim=16, mlp_size=192, patch_size=7, position_grid=8),
    )  # fmt: skip


def k2_nano() -> ModelConfig:
    """K2-style baseline at nano's FLOPs: MLA with RoPE, SwiGLU experts in full width, sign-updated bias, plain residual."""
    return ModelConfig(
        vocab_size=4096, hidden_size=128, num_layers=4, mixer="mla", residual="plain", activation="swiglu", dense_size=384,
        init_range=0.006,
        mla=MLAConfig(num_heads=4, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
                      output_gate=False, rope_theta=10000.0),
        moe=MoEConfig(num_experts=16, experts_per_token=2, num_shared_experts=1, expert_size=64, latent_size=None,
                      latent_norm=False, balancer="sign"),
    )  # fmt: skip


def small() -> ModelConfig:
    """About 0.1 B parameters."""
    return ModelConfig(
        vocab_size=16384, hidden_size=512, num_layers=9, attn_res_block_layers=3, dense_size=2048,
        kda=KDAConfig(num_heads=8, head_dim=64),
        mla=MLAConfig(num_heads=8, q_lora_rank=256, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64),
        moe=MoEConfig(num_experts=32, experts_per_token=4, num_shared_experts=1, expert_size=320, latent_size=256),
    )  # fmt: skip


def mini() -> ModelConfig:
    """About 1.4 B parameters; trains on one H200."""
    return ModelConfig(
        vocab_size=16384, hidden_size=1024, num_layers=25, attn_res_block_layers=4, dense_size=4096,
        kda=KDAConfig(num_heads=16, head_dim=64),
        mla=MLAConfig(num_heads=16, q_lora_rank=384, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64),
        moe=MoEConfig(num_experts=64, experts_per_token=8, num_shared_experts=1, expert_size=512, latent_size=512),
    )  # fmt: skip


def mid() -> ModelConfig:
    """8 to 12 B parameters; serving and kernels."""
    return ModelConfig(
        vocab_size=65536, hidden_size=2048, num_layers=37, attn_res_block_layers=6, dense_size=8192,
        kda=KDAConfig(num_heads=16, head_dim=128),
        mla=MLAConfig(num_heads=16, q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        moe=MoEConfig(num_experts=128, experts_per_token=8, num_shared_experts=1, expert_size=576, latent_size=1024),
    )  # fmt: skip


def kimi_linear_48b() -> ModelConfig:
    """Kimi-Linear-48B-A3B: softplus decay, low-rank output gate, no latent, plain residual, SwiGLU."""
    return ModelConfig(
        vocab_size=163840, hidden_size=2304, num_layers=27, residual="plain", activation="swiglu", dense_size=9216,
        kda=KDAConfig(num_heads=32, head_dim=128, gate_lower_bound=None, output_gate_rank=128),
        mla=MLAConfig(num_heads=32, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                      v_head_dim=128, output_gate=False),
        moe=MoEConfig(num_experts=256, experts_per_token=8, num_shared_experts=1, expert_size=1024, latent_size=None,
                      latent_norm=False, routed_scaling_factor=2.446, balancer="sign"),
    )  # fmt: skip


def k3() -> ModelConfig:
    """Kimi K3, 2.78 T parameters: built on the meta device only."""
    return ModelConfig(
        vocab_size=163840, hidden_size=7168, num_layers=93, attn_res_block_layers=12, dense_size=33792,
        kda=KDAConfig(num_heads=96, head_dim=128, stored_heads=128),
        mla=MLAConfig(num_heads=96, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        moe=MoEConfig(num_experts=896, experts_per_token=16, num_shared_experts=2, expert_size=3072, latent_size=3584),
        vision=VisionConfig(),
    )  # fmt: skip


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "tiny": tiny,
    "nano": nano,
    "nano_vision": nano_vision,
    "small": small,
    "mini": mini,
    "mid": mid,
    "k2_nano": k2_nano,
    "kimi_linear_48b": kimi_linear_48b,
    "k3": k3,
}

TRAINABLE = ("tiny", "nano", "nano_vision", "small", "mini", "k2_nano")


def preset(name: str) -> ModelConfig:
    """Return the model preset `name`.

    Raises:
        ConfigError: no such preset; the message suggests the nearest one.
    """
    if not isinstance(name, str):  # from a file
        raise ConfigError(f"preset={name!r} must be one of the names {', '.join(PRESETS)}")
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown preset {name!r}{hint}; allowed: {', '.join(PRESETS)}")
    return PRESETS[name]()


def training(name: str) -> TrainConfig:
    """Return the training run that fits the preset `name`: batch, steps, curriculum and learning rates.

    Raises:
        ConfigError: no such preset, or one that is not trained on a single machine.
    """
    model = preset(name)
    if name not in TRAINABLE:
        raise ConfigError(
            f"preset {name!r} is not for training on one machine; trainable presets: {', '.join(TRAINABLE)}"
        )
    if name == "tiny":
        return TrainConfig(
            model=model, stages=(StageConfig(seq_len=64),), steps=100, tokens_per_step=512, microbatch_tokens=512
        )
    if name in ("nano", "k2_nano"):
        # Chosen by two sweeps of 29 short CPU runs (docs/training-nano.md): a high AdamW rate and short windows first matter most.
        return TrainConfig(
            model=model, steps=700, tokens_per_step=2048, microbatch_tokens=2048,
            stages=(StageConfig(seq_len=64, fraction=0.3), StageConfig(seq_len=128, fraction=0.4),
                    StageConfig(seq_len=256, fraction=0.2), StageConfig(seq_len=512, fraction=0.1)),
            optim=OptimConfig(lr_muon=0.01, lr_adamw=0.015, momentum=0.9, beta1=0.8, beta2=0.99),
            eval=EvalConfig(every=100),
        )  # fmt: skip
    if name == "nano_vision":
        # Half of nano's rates: shapes are learnt late, and earlier so (docs/how-to/vision.md). 128 tokens hold three pictures.
        base = training("nano")
        return replace(
            base, model=model, steps=700, stages=(StageConfig(seq_len=128),), data=DataConfig(vision=VisionDataConfig(share=0.75)),
            optim=replace(base.optim, lr_muon=0.005, lr_adamw=0.008),
        )  # fmt: skip
    return TrainConfig(
        model=model, steps=20000, tokens_per_step=131072, microbatch_tokens=32768,
        stages=(StageConfig(seq_len=2048, fraction=0.8), StageConfig(seq_len=8192, fraction=0.2)),
        optim=OptimConfig(lr_muon=0.01, lr_adamw=0.002), eval=EvalConfig(every=500),
    )  # fmt: skip
