"""Tensors between bands of poison: a kernel that writes or reads beside one, or leaves an element unwritten, shows.

The bytes of a band and of fresh memory are 0xFF, which is a NaN in every float type and -1 in every signed integer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BAND = 1 << 16  # bytes on either side
POISON = 0xFF
_aten = torch.ops.aten
_FRESH = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip
_FILLED = {
    _aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default, _aten.full.default, _aten.full_like.default,
    _aten.ones.default, _aten.ones_like.default,
}  # fmt: skip


class GuardBands(TorchDispatchMode):
    """While this is on, every tensor that is made on the device lies between bands and starts as poison.

    On the way out it fails if a band has changed. It sees tensors that Python or an autograd function asks for, in the
    backward pass too; not the insides of a library's call.
    """

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.device = device
        self.held: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (func in _FRESH or func in _FILLED) and out.device.type == self.device and out.numel():
            between = self._between(out, str(func))
            return between.copy_(out) if func in _FILLED else between
        return out

    def of(self, x: Tensor) -> Tensor:
        """A copy between bands, in the same layout."""
        return self._between(x, "input").copy_(x)

    def _between(self, x: Tensor, name: str) -> Tensor:
        size = x.element_size() * (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)))
        room = -(-size // 256) * 256  # the next tensor of an allocator begins at such a multiple too
        whole = torch.full((2 * BAND + room,), POISON, dtype=torch.uint8, device=x.device)
        self.held.append((f"{name} {tuple(x.shape)} {x.dtype}, {size} bytes", whole))
        inside = whole[BAND : BAND + room].view(x.dtype)
        return inside.as_strided(x.shape, x.stride(), inside.storage_offset())

    def check(self) -> None:
        """Fail if a band has changed, and say of which tensor and where."""
        for name, whole in self.held:
            size = int(name.rsplit(", ", 1)[1].split()[0])
            for side, band, start in (("before", whole[:BAND], -BAND), ("after", whole[BAND + size :], size)):
                changed = (band != POISON).nonzero()
                assert not len(changed), (
                    f"{len(changed)} bytes {side} {name} written, the first at {start + int(changed[0])}"
                )

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if exception[0] is None:
            self.check()
