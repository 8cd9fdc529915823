"""For which calls the Triton kernels run, and why not for the others. Imports no Triton."""

from __future__ import annotations

import torch

from perilune.ops.choice import forced
from perilune.ops.kda.arguments import Arguments
from perilune.ops.triton.available import interpreted, obstacle

DIMS = (64, 128)  # key and value channels of a head on a GPU: what the tensor cores' instructions divide
LEAST_DIM = 16  # rows and columns of the smallest product that Triton makes


def dtype_obstacle(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Why the kernels cannot take tensors like these; None if they can."""
    reason = obstacle(device, *dtypes)
    if reason is None and dtypes and device.type == "cuda" and dtypes[0] == torch.float32:
        return "on a GPU the KDA kernels multiply in bfloat16, which would round float32 q, k and v"
    return reason


def unsuitable(args: Arguments) -> str | None:
    """Why the kernels do not take this call, though they take its element types; None if they do."""
    dims = args.key_dim, args.value_dim
    if interpreted():
        if any(d < LEAST_DIM or d & (d - 1) for d in dims):
            return f"the KDA kernels need K and V to be powers of 2 from {LEAST_DIM} on, not {dims[0]} and {dims[1]}"
        return None
    if any(d not in DIMS for d in dims):
        return f"the KDA kernels need K and V to be 64 or 128, not {dims[0]} and {dims[1]}"
    return None if forced() == "triton" else _not_run_yet(args)


def _not_run_yet(args: Arguments) -> str | None:
    """The kernels cover more than what has been compared with float64 on a GPU; the rest waits for tests/gpu to pass."""
    if args.q.dtype != torch.bfloat16:
        return "the KDA kernels have been checked on a GPU for bfloat16 only; force('triton') runs them"
    if not args.bounded:
        return "the KDA kernels have been checked on a GPU for the bounded gate only; force('triton') runs them"
    if (args.key_dim, args.value_dim) != (128, 128):
        return "the KDA kernels have been checked on a GPU for K = V = 128 only; force('triton') runs them"
    return None
