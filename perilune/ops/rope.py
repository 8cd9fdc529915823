"""Rotary position embedding, for the ablation mixers only: K3's own attention has no positions (report §2.1.2).

Channel j of the first half is paired with channel j of the second half (the layout of most public models), and the pair
is turned by the angle position * theta^(-2j/r).
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.errors import ConfigError


def rope(x_BTHr: Tensor, position_BT: Tensor, theta: float) -> Tensor:
    """Rotate channel pairs by their token's position.

    Args:
        x_BTHr: [B, T, H, r], r even.
        position_BT: [B, T] integers, or [T] for positions that all rows share.
        theta: base of the wavelengths, above 0.

    Returns:
        [B, T, H, r] in x's dtype.

    Raises:
        ConfigError: r is odd, or theta is not positive.
    """
    width = x_BTHr.shape[-1]
    if width % 2 or not theta > 0:
        raise ConfigError(f"rope got {width} channels and theta={theta}; the channels must be even and theta above 0")
    # Angles in float64: at position 10^6 a float32 product is already wrong by 0.06 rad.
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device=x_BTHr.device) / width
    angle = position_BT.to(torch.float64)[..., None, None] * theta**-exponent
    exact = torch.promote_types(x_BTHr.dtype, torch.float32)
    cos, sin = angle.cos().to(exact), angle.sin().to(exact)
    first, second = x_BTHr.to(exact).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BTHr.dtype)
