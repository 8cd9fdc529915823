"""The same Kimi-Linear-shaped model on both sides: ours, and transformers' own with our weights.

transformers' CPU path is its torch fallback; it is the only other public implementation that trains and decodes this
architecture without a GPU. On a GPU it runs fla-core's kernels.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from perilune.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from perilune.config.published import publish, to_json
from perilune.errors import ConfigError
from perilune.model import Transformer, init_weights
from perilune.model.hf import to_published

# 19 M parameters: 9 layers of which 6 KDA with softplus gate, plain residual, experts without a latent.
UNRELATED = 2 / math.pi**0.5  # mean difference of independent normal numbers over their spread
SHAPE = ModelConfig(
    vocab_size=4096, hidden_size=256, num_layers=9, residual="plain", activation="swiglu", dense_size=1024,
    kda=KDAConfig(num_heads=4, head_dim=64, gate_lower_bound=None, output_gate_rank=64),
    mla=MLAConfig(num_heads=4, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, output_gate=False),
    moe=MoEConfig(num_experts=16, experts_per_token=4, num_shared_experts=1, expert_size=128, latent_norm=False, balancer="sign"),
)  # fmt: skip


def import_peer() -> Any:
    """The transformers module.

    Raises:
        ConfigError: transformers is missing or has no kimi_linear.
    """
    try:
        import transformers

        _ = transformers.KimiLinearForCausalLM
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the peer needs a transformers that has kimi_linear (5.24 or newer): pip install 'perilune[bench]' ({error})"
        ) from error
    transformers.logging.set_verbosity_error()
    return transformers


def kimi_linear_shaped(cfg: ModelConfig) -> ModelConfig:
    """A K3-shaped config as the nearest one of Kimi-Linear's architecture: softplus gate, low-rank output gate, plain
    residual, SwiGLU experts without a latent and as many numbers an expert."""
    kda, mla, moe = cfg.kda, cfg.mla, cfg.moe
    assert kda and mla and moe and moe.latent_size, "a K3-shaped config has all three"
    return replace(
        cfg, residual="plain", activation="swiglu",
        kda=replace(kda, gate_lower_bound=None, output_gate_rank=kda.head_dim), mla=replace(mla, output_gate=False),
        moe=replace(moe, latent_size=None, latent_norm=False, balancer="sign",
                    expert_size=moe.expert_size * moe.latent_size // cfg.hidden_size),
    )  # fmt: skip


def pair(cfg: ModelConfig = SHAPE, seed: int = 0, device: str = "cpu") -> tuple[Transformer, Any]:
    """Return (ours, theirs) with equal weights, fp32, and check that they agree before anything is timed.

    Raises:
        ConfigError: no peer is installed.
        AssertionError: the logits disagree by more than 1e-4 of their spread, or on a GPU, in bfloat16, by more than
            rounding explains.
    """
    transformers = import_peer()
    ours = init_weights(Transformer(cfg), seed).to(device)
    with tempfile.TemporaryDirectory() as folder:
        save_file(
            {n: t.contiguous().clone() for n, t in to_published(ours)},
            Path(folder) / "model.safetensors",
            {"format": "pt"},
        )
        (Path(folder) / "config.json").write_text(json.dumps(to_json(publish(cfg))))
        theirs = transformers.KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    cross_check(ours, theirs)
    return ours, theirs


@torch.no_grad()
def cross_check(ours: Transformer, theirs: Any) -> float:
    """How far the peer's logits over a short text are from ours in fp32, relative to their spread: the largest difference
    in fp32; on a GPU the peer computes in bfloat16, whose rounding sends a token to another expert here and there, and the
    mean difference must be like that of ours in bfloat16."""
    ids = random_ids(ours.cfg, 2, 48).to(ours.device)
    ours.eval().compute_dtype = torch.float32
    a = ours(ids).logits_BTZ
    if ours.device.type == "cuda":
        with torch.autocast("cuda", torch.bfloat16):
            b = theirs.eval()(ids, use_cache=False).logits.float()
        ours.compute_dtype = torch.bfloat16
        error = float((a - b).abs().mean() / a.std())
        limit = 1.5 * float((a - ours(ids).logits_BTZ.float()).abs().mean() / a.std())
    else:
        b = theirs.eval()(ids, use_cache=False).logits.float()
        error, limit = float((a - b).abs().max() / a.std()), 1e-4
    assert error < limit, (
        f"ours and the peer disagree by {error:.1e} of the logits' spread, above {limit:.1e}; nothing was timed"
    )
    return error


def random_ids(cfg: ModelConfig, batch: int, tokens: int, seed: int = 0) -> Tensor:
    """int64 `[batch, tokens]`."""
    return torch.randint(0, cfg.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(seed))
