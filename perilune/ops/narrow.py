"""Half-precision copies of float32 weights, made once for all their uses in a training step.

A weight is read by every micro-batch, by some operations in both directions, and rounded each time. For as long as a
`NarrowCopies` is up to date, `in_dtype` gives its copies instead; whoever moves the weights must drop them first.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

ATTRIBUTE = "copy_of_this_step"


def in_dtype(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, without a gradient through it: its copy of this step, if there is one, or a fresh one."""
    copy = getattr(weight, ATTRIBUTE, None)
    return weight.detach().to(dtype) if copy is None or copy.dtype is not dtype else copy


class NarrowCopies:
    """Copies of the parameters that lie on a CUDA device; in other cases there are none.

    Args:
        parameters: float32 ones are copied, others left alone.
        dtype: of the copies; nothing is copied unless it is narrower.
    """

    def __init__(self, parameters: Iterable[Parameter], dtype: torch.dtype) -> None:
        found = [p for p in parameters if p.is_cuda and p.dtype is torch.float32 and dtype.itemsize < p.dtype.itemsize]
        self._wide = [p for p in found if type(p) is Parameter]
        self._narrow = [torch.empty(p.shape, dtype=dtype, device=p.device) for p in self._wide]

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the weights as they are now, and let `in_dtype` give these copies."""
        if self._wide:
            torch._foreach_copy_(self._narrow, self._wide)
        for wide, narrow in zip(self._wide, self._narrow, strict=True):
            setattr(wide, ATTRIBUTE, narrow)

    def drop(self) -> None:
        """Let nobody read the copies any more: the weights are about to move."""
        for wide in self._wide:
            if hasattr(wide, ATTRIBUTE):
                delattr(wide, ATTRIBUTE)
