"""What the serial kernels of `chunk_kda` in CUDA have in common: for which calls they run, and how one is made."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel

DIMS = (64, 128)
GROUP = 64  # value channels of a warpgroup
_FOLDER = Path(__file__).parent
_BLOCK, _SLOTS = 8192, 5


def serial_kernel(name: str, parameters: str, key_dim: int, width: int, defines: dict[str, int]) -> Kernel:
    """A kernel built on scan_tiles.h; its shared memory is laid out there."""
    groups, wide = width // GROUP, key_dim // 64
    half = max(wide + 1 + groups, 2 * wide + 1) * _BLOCK + 1024
    return Kernel(
        _FOLDER / f"{name}.cu",
        name,
        parameters,
        threads=128 * (groups + 1),
        shared_bytes=_SLOTS * half + groups * _BLOCK + 128,
        defines={"KEY_DIM": key_dim, "GROUPS": groups} | defines,
        early=True,
    )


def obstacle(rows: Tensor, key_dim: int, *dtypes: torch.dtype) -> str | None:
    """What about a call keeps the serial kernels, forward or backward, from taking it; None if nothing does.

    Args:
        rows: v, or the cotangent of o, `[tokens, heads, V]`.
        key_dim: K.
        dtypes: of what `prepare` writes, and of the outputs.
    """
    for dtype in (rows.dtype, *dtypes):
        if dtype != torch.bfloat16:
            return f"the CUDA kernel works in bfloat16, not {str(dtype).removeprefix('torch.')}"
    value_dim = rows.shape[-1]
    if key_dim not in DIMS or value_dim not in DIMS:
        return f"the CUDA kernel is written for K and V of 64 or 128, not {key_dim} and {value_dim}"
    if rows.data_ptr() % 16 or any(n % 8 for n in rows.stride()[:2]):
        return "the CUDA kernel copies 16 bytes at a time: v must begin, and its rows lie, at multiples of that"
    return None
