"""Keys and values of latent attention from what the up-projection gives and the key channels that all heads share.

k[h] = [kv[h, :n] | shared],   v[h] = kv[h, n:]
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.ops.choice import Choice
from perilune.ops.triton.available import choose as choose_triton


def select(kv_BTHC: Tensor, shared_BTr: Tensor) -> Choice:
    """Say which implementation puts keys together, and why."""
    return choose_triton(kv_BTHC, shared_BTr) or Choice("torch", "a concatenation")


def keys_and_values(kv_BTHC: Tensor, shared_BTr: Tensor, content: int) -> tuple[Tensor, Tensor]:
    """Put keys together.

    Args:
        kv_BTHC: `[B, T, H, n + V]`, content keys and values.
        shared_BTr: `[B, T, r]`.
        content: n.

    Returns:
        Keys `[B, T, H, n + r]`, and values `[B, T, H, V]`, a view.
    """
    if select(kv_BTHC, shared_BTr).implementation == "triton" and kv_BTHC.is_contiguous():
        from perilune.ops.mla.triton_keys import keys_and_values as fused

        return fused(kv_BTHC, shared_BTr, content)
    own, v = kv_BTHC.split((content, kv_BTHC.shape[-1] - content), dim=-1)
    shared = shared_BTr[..., None, :].expand(*own.shape[:-1], shared_BTr.shape[-1])
    return torch.cat((own, shared), dim=-1), v
