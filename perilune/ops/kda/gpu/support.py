"""For which calls the GPU kernels run, and why not for the others. Imports no Triton."""

from __future__ import annotations

from functools import cache

import torch

from perilune.ops.cuda import unavailable_reason
from perilune.ops.kda.arguments import Arguments
from perilune.ops.triton.available import interpreted, obstacle

DIMS = (64, 128)  # key and value channels of a head on a GPU: what the tensor cores' instructions divide
MOST_UNITS = 65_535  # the second dimension of a grid
MOST_SEQUENCES = 32_768  # so that there is room for the segments that sequences are cut into
LEAST_DIM = 16  # rows and columns of the smallest product that Triton makes


def dtype_obstacle(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Why the kernels cannot take tensors like these; None if they can."""
    reason = obstacle(device, *dtypes)
    if reason is None and dtypes and device.type == "cuda" and dtypes[0] == torch.float32:
        return "on a GPU the KDA kernels multiply in bfloat16, which would round float32 q, k and v"
    return reason


@cache
def kernels(device: torch.device) -> str:
    """Which kernels run on a device that they run on, in words."""
    reason = unavailable_reason(device)
    if reason is None:
        return "CUDA kernels where they take the call, else Triton kernels; products in bfloat16, state in float32"
    return f"Triton kernels, products in bfloat16, state in float32; {reason}"


def unsuitable(args: Arguments) -> str | None:
    """Why the kernels do not take this call, though they take its element types; None if they do."""
    dims = args.key_dim, args.value_dim
    if args.plan is None and args.sequences > MOST_SEQUENCES:
        return f"the KDA kernels take {MOST_SEQUENCES} sequences at once, not {args.sequences}"
    if args.plan is not None and args.plan.unit_count > MOST_UNITS:
        return f"the KDA kernels take tables of {MOST_UNITS} units, not {args.plan.unit_count}"
    if interpreted():
        if any(d < LEAST_DIM or d & (d - 1) for d in dims):
            return f"the KDA kernels need K and V to be powers of 2 from {LEAST_DIM} on, not {dims[0]} and {dims[1]}"
        return None
    if any(d not in DIMS for d in dims):
        return f"the KDA kernels need K and V to be 64 or 128, not {dims[0]} and {dims[1]}"
    if args.beta_scale > 1:
        return (
            "write strengths up to 2 (allow_neg_eigval): of a repeated key the entries of (I + L)^-1 then alternate and must "
            "cancel, which they do not once the kernels have rounded them to bfloat16"
        )
    return None
