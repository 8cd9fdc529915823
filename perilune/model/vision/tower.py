"""MoonViT-V2: patches of packed images and clips to features, trained from scratch with the text model (report §2.4).

    x = W_patch · patch + table(row, column) [+ code(frame) if the item has several]
    each block:  x += W_o Attn(Norm(x));  x += W_1 gelu_tanh(W_0 Norm(x))
    out = Norm(x)

Modules have the names of the published checkpoint. A norm's eps is by default the smallest step of the activations' dtype
at 1, so a bf16 and an fp32 run of the same weights are not the same function (`VisionConfig.norm_eps`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from perilune.config import VisionConfig
from perilune.errors import RequestError
from perilune.model.vision.block import VisionBlock, VisionNorm
from perilune.model.vision.embed import PatchEmbed
from perilune.model.vision.grids import Grid, checked_grids
from perilune.model.vision.positions import grid_angles


class VisionEncoder(nn.Module):
    """The blocks and the last norm."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.head_dim = vision.head_dim
        self.blocks = nn.ModuleList(VisionBlock(vision) for _ in range(vision.num_layers))
        self.final_layernorm = VisionNorm(vision.hidden_size, vision.norm_eps)

    def rotation(self, items: Sequence[Grid], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the packed items' angles, `[P, K/2]` each, fp32 or wider; frames of an item share them."""
        exact = torch.promote_types(dtype, torch.float32)
        sizes = {(h, w) for _, h, w in items}
        by_size = {(h, w): grid_angles(h, w, self.head_dim, dtype=exact, device=device) for h, w in sizes}
        angle = torch.cat([by_size[h, w].repeat(t, 1) for t, h, w in items])
        return angle.cos(), angle.sin()

    def forward(self, x_PD: Tensor, items: Sequence[Grid]) -> Tensor:
        """`[P, D]` to `[P, D]`."""
        rotation = self.rotation(items, x_PD.dtype, x_PD.device)
        lengths = [t * h * w for t, h, w in items]
        for block in self.blocks:
            x_PD = block(x_PD, rotation, lengths)
        return self.final_layernorm(x_PD)


class VisionTower(nn.Module):
    """Patch embedding and encoder."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.vision = vision
        self.patch_embed = PatchEmbed(vision)
        self.encoder = VisionEncoder(vision)

    def forward(self, patches: Tensor, grids: Tensor) -> Tensor:
        """Features of packed items, `[P, D]` in the dtype of the patches.

        Args:
            patches: `[P, 3, p, p]`: of each item its frames, of each frame its rows of patches.
            grids: int64 `[n, 3]`: frames, rows and columns of patches of each item, n at least 1.

        Raises:
            RequestError: the patches have another size than the model's, or another number than the grids say, or a grid
                is outside the limits.
        """
        items = checked_grids(grids, self.vision)
        side, count = self.vision.patch_size, sum(t * h * w for t, h, w in items)
        if patches.shape[1:] != (3, side, side) or len(patches) != count or not items:
            raise RequestError(
                f"patches of shape {list(patches.shape)} were given; the {len(items)} grids need [{count}, 3, {side}, {side}]"
                " with at least one grid: process the images with the model's patch size"
            )
        return self.encoder(self.patch_embed(patches, items), items)
