"""Bytes that a sequence occupies while it is served (architecture §11.1)."""

from __future__ import annotations

from perilune.config import ModelConfig

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def recurrent_bytes(cfg: ModelConfig, *, memory: str = "fp32", window: str = "bf16") -> int:
    """Bytes of all recurrent layers' states of one sequence, whatever its length (K3: 449,372,160).

    Args:
        cfg: the model.
        memory: format of the matrices.
        window: format of the short convolution's window.
    """
    layers = sum(kind in ("kda", "gdn") for kind in cfg.layer_mixers)
    if not layers:
        return 0
    kda = cfg.kda
    matrices = kda.num_heads * kda.head_dim * kda.value_dim * BYTES[memory]
    return layers * (matrices + kda.conv_width * (kda.conv_kernel - 1) * BYTES[window])


def cache_bytes_per_token(cfg: ModelConfig, *, entry: str = "bf16") -> int:
    """Bytes that all attention layers cache for each token (K3: 27,648)."""
    numbers = 0
    for kind in cfg.layer_mixers:
        if kind == "mla":
            numbers += cfg.mla.cache_width
        elif kind == "softmax":
            numbers += 2 * cfg.softmax.num_heads * cfg.softmax.head_dim
    return numbers * BYTES[entry]
