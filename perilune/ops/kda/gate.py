"""The decay gate of Kimi Delta Attention: from raw logits to log-decays g <= 0 (natural logarithm), one a key channel.

    bounded   g = lower_bound * sigmoid(exp(A_log) * (z + dt_bias))        in (lower_bound, 0)   (K3: report §2.1.1, Eq. 5)
    softplus  g = -exp(A_log) * softplus(z + dt_bias)                      in (-inf, 0)          (Kimi-Linear)

`A_log` is one number a head. `lower_bound` chooses the function; it is not a clamp. Decays are `exp(g)` everywhere in
this package: no buffer holds base-2 logarithms.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any input is, else float32: the dtype in which gates, norms and states are computed."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def fused_kda_gate(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None = None, lower_bound: float | None = None
) -> Tensor:
    """Log-decay of raw logits `g` `[..., HV, K]`; `A_log` `[HV]`, `dt_bias` `[HV*K]` or `[HV, K]`.

    Returns float32 (float64 for float64 logits) `[..., HV, K]`. `A_log=None` means 0 and needs a `lower_bound`.
    """
    heads, key_dim = g.shape[-2:]
    dtype = compute_dtype(g)
    z = g.to(dtype)
    if dt_bias is not None:
        z = z + dt_bias.to(dtype).view(heads, key_dim)
    rate = None if A_log is None else A_log.to(dtype).exp().view(heads, 1)
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(z if rate is None else rate * z)
    assert rate is not None, "the softplus gate needs A_log"
    return rate * logsigmoid(-z)  # softplus(z) = -logsigmoid(-z), exact at both ends, where F.softplus cuts at 20
