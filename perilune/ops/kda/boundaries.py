"""Where packed sequences begin, on the host, where the work is cut; read from a device as seldom as can be.

Reading a tensor from a device waits for all that was asked of it. A model passes one tensor to all its layers, so what was read of
a tensor is kept for as long as the tensor lives and torch has not written to it. A write that torch does not count (the
replay of a CUDA graph, a kernel of one's own) goes unseen: give `cu_seqlens_cpu`, or a new tensor, behind it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

KEPT = 8  # tensors


class _Read(NamedTuple):
    tensor: weakref.ref[Tensor]
    version: int
    offsets: tuple[int, ...]


_read: dict[int, _Read] = {}


def boundaries(cu_seqlens: Tensor | Sequence[int] | None) -> tuple[int, ...] | None:
    """The numbers as a tuple; None for None."""
    if cu_seqlens is None or type(cu_seqlens) is tuple:
        return cu_seqlens
    if not isinstance(cu_seqlens, Tensor):
        return tuple(cu_seqlens)
    if cu_seqlens.is_cpu or cu_seqlens.is_inference():  # tensors of inference mode do not count what is written to them
        return tuple(cu_seqlens.tolist())
    known, version = _read.get(id(cu_seqlens)), cu_seqlens._version
    if known is not None and known.tensor() is cu_seqlens and known.version == version:
        return known.offsets
    offsets = tuple(cu_seqlens.tolist())
    if len(_read) >= KEPT:
        _read.pop(next(iter(_read)), None)
    _read[id(cu_seqlens)] = _Read(weakref.ref(cu_seqlens), version, offsets)
    return offsets
