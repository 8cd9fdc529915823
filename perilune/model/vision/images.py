"""The images of one batch of tokens: their patches, their grids, and the tokens they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from perilune.errors import RequestError


class Patches(Protocol):
    """What `ImageBatch.collate` needs of an image: `perilune.data.image.ProcessedImage` is one."""

    @property
    def patches(self) -> Tensor: ...

    @property
    def grid(self) -> tuple[int, int, int]: ...


class ImageBatch(NamedTuple):
    """Images packed end to end, and where their rows go.

    Attributes:
        patches: `[P, 3, p, p]`, normalised; of each image its frames, of each frame its rows of patches.
        grids: int64 `[n, 3]` on the CPU: frames, rows and columns of patches of each image.
        positions: int64 `[N]`: indices into the flattened `B·T` tokens that the N = Σ (h/m)(w/m) projected rows replace, in
            the order of the images and, inside one, row by row.
    """

    patches: Tensor
    grids: Tensor
    positions: Tensor

    @staticmethod
    def collate(images: Sequence[Patches], positions: Tensor | Sequence[int]) -> ImageBatch:
        """Pack images.

        Args:
            images: at least one.
            positions: see `positions`; that they are as many as the images' tokens is checked by the model.

        Raises:
            RequestError: no image, or patches of different sizes.
        """
        if not images:
            raise RequestError("there is no image to collate; pass images=None to the model for text alone")
        sizes = sorted({tuple(image.patches.shape[1:]) for image in images})
        if len(sizes) > 1:
            raise RequestError(f"images with patches of the shapes {sizes} cannot be packed; process all alike")
        grids = torch.tensor([image.grid for image in images], dtype=torch.int64)
        where = torch.as_tensor(positions, dtype=torch.int64)
        return ImageBatch(torch.cat([image.patches for image in images]), grids, where)

    def to(self, device: torch.device | str) -> ImageBatch:
        """Move patches and positions; the grids stay on the CPU, where the tower reads them without waiting."""
        return ImageBatch(self.patches.to(device), self.grids, self.positions.to(device))


class ImageRows(NamedTuple):
    """What the projector made of images, or a part of it, for a chunk of tokens.

    Attributes:
        rows_ND: from `Transformer.image_rows`.
        positions: int64 `[N]`: indices into the flattened `B·T` tokens of the chunk, one for each row.
    """

    rows_ND: Tensor
    positions: Tensor
