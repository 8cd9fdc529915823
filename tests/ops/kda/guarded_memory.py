"""Tensors on the CPU between pages that may not be touched: an emulated kernel that reads beside one ends the process there.

It reads memory by address like a kernel on a GPU, where such a read may go unnoticed for as long as somebody owns what lies
there.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FORBIDDEN = 1 << 22  # bytes on either side
FRESH = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class GuardedMemory(TorchDispatchMode):
    """While this is on, every tensor that is made without values begins, or ends, at a forbidden page, and is filled with NaN.

    Args:
        at_end: where it touches the page; to 16 bytes.
    """

    def __init__(self, *, at_end: bool) -> None:
        super().__init__()
        self._at_end, self._kept = at_end, []
        self._system = ctypes.CDLL(None, use_errno=True)
        self._system.mmap.restype = ctypes.c_void_p
        self._system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._system.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        fresh = func.overloadpacket.__name__ in FRESH and out.is_cpu and out.numel()
        return self._moved(out) if fresh else out

    def of(self, x: Tensor) -> Tensor:
        """A copy, in the same layout."""
        return self._moved(x).copy_(x)

    def _moved(self, x: Tensor) -> Tensor:
        size = x.element_size() * (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)))
        room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = self._system.mmap(None, room + 2 * FORBIDDEN, 0, flags, -1, 0)
        assert base not in (None, ctypes.c_void_p(-1).value), "no address space"
        assert self._system.mprotect(base + FORBIDDEN, room, _READ_AND_WRITE) == 0, "no memory"
        first = room - -(-size // 16) * 16 if self._at_end else 0
        memory = (ctypes.c_uint8 * size).from_address(base + FORBIDDEN + first)
        self._kept.append(memory)
        whole = torch.frombuffer(memory, dtype=torch.uint8).fill_(255)
        return whole.view(x.dtype).as_strided(x.shape, x.stride(), 0)
