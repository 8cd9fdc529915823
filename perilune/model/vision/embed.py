"""Patch embedding: a linear map of the pixels, and where the patch is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from perilune.config import VisionConfig
from perilune.model.vision.grids import Grid
from perilune.model.vision.positions import frame_code, resized_table
from perilune.ops.linear import linear


class PatchProjection(nn.Module):
    """A patch `[3, p, p]` to D numbers: the linear map that a convolution of stride p applies."""

    def __init__(self, size: int, patch: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, 3, patch, patch))

    def forward(self, patches: Tensor) -> Tensor:
        """`[P, 3, p, p]` to `[P, D]`."""
        return linear(patches.flatten(1), self.weight.flatten(1))


class PositionTable(nn.Module):
    """The learned table and the fixed frame code (`positions`)."""

    def __init__(self, side: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(side, side, size))

    def forward(self, items: Sequence[Grid], dtype: torch.dtype) -> Tensor:
        """Positions of the packed items, `[P, D]`; each distinct grid is resized once."""
        exact = torch.promote_types(dtype, torch.float32)
        table = self.weight.to(exact)
        by_size = {size: resized_table(table, *size) for size in {(h, w) for _, h, w in items}}
        parts = []
        for t, h, w in items:
            place = by_size[h, w]
            if t > 1:
                code = frame_code(t, place.shape[-1], dtype=exact, device=place.device)
                place = (place + code[:, None]).flatten(0, 1)
            parts.append(place)
        return torch.cat(parts).to(dtype)


class PatchEmbed(nn.Module):
    """Projection and positions."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.proj = PatchProjection(vision.hidden_size, vision.patch_size)
        self.pos_emb = PositionTable(vision.position_grid, vision.hidden_size)

    def forward(self, patches: Tensor, items: Sequence[Grid]) -> Tensor:
        """`[P, 3, p, p]` to `[P, D]`."""
        x_PD = self.proj(patches)
        return x_PD + self.pos_emb(items, x_PD.dtype)
