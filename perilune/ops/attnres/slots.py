"""Common memory for tensors of one shape that autograd sees one by one.

A kernel that handles all read sites at once wants their partial mixes, and the gradients of these, as one tensor. As
views of it autograd would give every site's gradient the size of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def parts(whole: Tensor) -> list[Tensor]:
    """whole[0], whole[1], ... of a contiguous tensor, as tensors that autograd does not know to share memory."""
    shape, size = whole.shape[1:], whole[0].numel() if len(whole) else 0
    storage, start = whole.untyped_storage(), whole.storage_offset()
    return [whole.new_empty(0).set_(storage, start + s * size, shape) for s in range(len(whole))]


class GradientSlots:
    """Where the gradients of S tensors are to be written; memory is taken when the first is asked for.

    Writing a gradient elsewhere is allowed, it is copied then.
    """

    def __init__(self, count: int, like: Tensor) -> None:
        self._count, self._like = count, like
        self._whole: Tensor | None = None
        self._parts: list[Tensor] = []

    def __getitem__(self, slot: int) -> Tensor:
        if self._whole is None:
            shape = (self._count, *self._like.shape)
            self._whole = torch.empty(shape, dtype=self._like.dtype, device=self._like.device)
            self._parts = parts(self._whole)
        return self._parts[slot]

    def collect(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """All gradients as one tensor [S, ...], None as zeros; the memory is given up."""
        for slot, gradient in enumerate(gradients):
            place = self[slot]
            if gradient is None:
                place.zero_()
            elif gradient.data_ptr() != place.data_ptr():
                place.copy_(gradient)
        whole, self._whole, self._parts = self._whole, None, []
        assert whole is not None, "there is at least one site"
        return whole
