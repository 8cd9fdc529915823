"""From features to rows of the text model: 2 x 2 patches become one token, frames are averaged (architecture §8.6).

merge    [t, h/m, m, w/m, m, D] -> mean over t -> [(h/m)(w/m), m², D], the four patches row by row
project  RMSNorm( W_2 gelu( W_0 [m²·D] ) )          gelu by the error function, no norm before, eps 1e-5
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from perilune.config import VisionConfig
from perilune.model.linear import Linear
from perilune.model.norm import RMSNorm
from perilune.model.vision.grids import Grid, checked_grids

NORM_EPS = 1e-5


def merge_patches(x_PD: Tensor, items: Sequence[Grid], merge: int) -> Tensor:
    """Gather the patches of each token and average over the frames: `[P, D]` to `[N, merge²·D]`."""
    rows = []
    for (t, h, w), x in zip(items, x_PD.split([t * h * w for t, h, w in items]), strict=True):
        squares = x.view(t, h // merge, merge, w // merge, merge, -1).transpose(2, 3)
        rows.append((squares.mean(0) if t > 1 else squares[0]).flatten(2).flatten(0, 1))
    return torch.cat(rows)


class Projector(nn.Module):
    """Two maps with GELU between and RMSNorm after; `proj.1` is the activation, so that names are the published ones."""

    def __init__(self, vision: VisionConfig, text_width: int) -> None:
        super().__init__()
        self.vision = vision
        merged = vision.hidden_size * vision.merge**2
        self.proj = nn.Sequential(Linear(merged, merged), nn.GELU(), Linear(merged, text_width))
        self.post_norm = RMSNorm(text_width, NORM_EPS)

    def forward(self, x_PD: Tensor, grids: Tensor) -> Tensor:
        """Features of packed items `[P, D]` to rows `[N, text width]`, item by item, row by row; grids as in the tower."""
        items = checked_grids(grids, self.vision)
        return self.post_norm(self.proj(merge_patches(x_PD, items, self.vision.merge)))
