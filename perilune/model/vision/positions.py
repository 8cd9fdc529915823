"""Where a patch is: a learned table resized to the grid, a fixed code for the frame, and rotations by column and row.

    table    [64, 64, D] resized to (h, w), bilinear, corners not aligned; unchanged if the sizes are equal
    frame τ  [sin(τ·w) | cos(τ·w)],  w_i = 10000^(-i / (D/2));  only if the item has more than one frame
    rotation pair 2i of a head's adjacent channels by x·f_i, pair 2i+1 by y·f_i,  f_i = 10000^(-4i / K);  x column, y row

Architecture §8.3. The first two are added once to the patch embeddings, the rotation is applied to queries and keys in
every block; all frames of an item rotate alike, so only the code tells them apart.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BASE = 10000.0


def resized_table(table_GGD: Tensor, height: int, width: int) -> Tensor:
    """Resize the learned table to a grid: `[G, G, D] -> [height·width, D]`, row by row; differentiable."""
    if table_GGD.shape[:2] == (height, width):
        return table_GGD.flatten(0, 1)
    resized = F.interpolate(table_GGD.permute(2, 0, 1)[None], size=(height, width), mode="bilinear")
    return resized[0].permute(1, 2, 0).flatten(0, 1)


def frame_code(
    frames: int, width: int, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """Fixed code of each frame of an item, `[frames, width]`: sines, then cosines. Not for single frames."""
    exponent = torch.arange(width // 2, dtype=dtype, device=device) / (width // 2)
    angle = torch.arange(frames, dtype=dtype, device=device)[:, None] * BASE**-exponent
    return torch.cat((angle.sin(), angle.cos()), dim=-1)


def grid_angles(
    height: int, width: int, head_dim: int, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """Angle of every channel pair at every patch of a grid, `[height·width, head_dim/2]`, row by row."""
    frequency = BASE ** (-torch.arange(0, head_dim, 4, dtype=dtype, device=device) / head_dim)
    x = torch.arange(width, dtype=dtype, device=device)[:, None] * frequency
    y = torch.arange(height, dtype=dtype, device=device)[:, None] * frequency
    angle = torch.stack((x[None].expand(height, -1, -1), y[:, None].expand(-1, width, -1)), dim=-1)
    return angle.reshape(height * width, head_dim // 2)


def rotate(x_PHK: Tensor, cos_PR: Tensor, sin_PR: Tensor) -> Tensor:
    """Turn the adjacent channels (2j, 2j+1) of every head by the angle of pair j; fp32 inside, same dtype out.

    Args:
        x_PHK: queries or keys.
        cos_PR, sin_PR: of the angles, R = K/2, fp32 or wider.
    """
    first, second = x_PHK.to(cos_PR.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_PR[:, None], sin_PR[:, None]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2).to(x_PHK.dtype)
