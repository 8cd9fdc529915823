"""When the Triton kernels of this package can run, and if not, why.

This module imports Triton only when it is asked, so it can be imported where the `kernels` extra is not installed.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

from perilune.ops.choice import Choice, forced

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TESTED = "3.6."  # the compiler and the interpreter change from release to release
OLDEST = (8, 0)  # compute capability that the kernels are written for; measured on 9.0


@cache
def interpreted() -> bool:
    """True if kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1 when Triton was imported)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def missing() -> str | None:
    """Why there is no Triton that the kernels are written for; None if there is."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed; pip install perilune[kernels]"
    if triton.__version__.startswith(TESTED):
        return None
    return f"the kernels are written for Triton {TESTED}x, here is {triton.__version__}"


@cache
def _device_obstacle(index: int) -> str | None:
    if torch.version.cuda is None:
        return "the Triton kernels are written for CUDA devices, not for this build of torch"
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        return (
            f"the Triton kernels need compute capability {OLDEST[0]}.{OLDEST[1]}, not {capability[0]}.{capability[1]}"
        )
    return None


@cache
def _taken(index: int) -> Choice:
    return Choice("triton", f"CUDA tensors on {torch.cuda.get_device_name(index)}")


_INTERPRETED = Choice("triton", "demanded by PERILUNE_OPS or force(), in Triton's interpreter")


def obstacle(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Why the Triton kernels cannot take tensors on `device` of these element types; None if they can."""
    for dtype in dtypes:
        if dtype not in DTYPES:
            return f"the Triton kernels take float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if device.type == "cuda":
        return missing() or _device_obstacle(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "cpu" and interpreted():
        return missing()
    return f"the Triton kernels run on CUDA devices, not on {device.type}"


def choose(*tensors: Tensor) -> Choice | None:
    """Take the Triton kernels where they can run and nothing else is demanded.

    Args:
        tensors: activations; the kernels want them on one device and of one element type.

    Returns:
        A `Choice` of "triton"; a `Choice` of "torch" with the reason if they were demanded or the tensors are on a CUDA
        device, yet they cannot run; None if they are of no concern here (CPU tensors, another implementation demanded).
    """
    wanted = forced()
    first = tensors[0]
    if wanted is None and first.is_cpu or wanted not in (None, "triton"):
        return None
    reason = obstacle(first.device, first.dtype)
    if reason is None:
        for x in tensors:
            if type(x) is not Tensor and type(x) is not Parameter:
                reason = f"the Triton kernels need plain tensors, not {type(x).__name__}"
            elif x.dtype != first.dtype or x.device != first.device:
                reason = f"the Triton kernels need one element type and device, not {first.dtype} on {first.device} and {x.dtype} on {x.device}"
    if reason is None and torch.compiler.is_compiling():
        reason = "the call is being traced by torch.compile"
    if reason is not None:
        return Choice("torch", f"triton was asked for, but {reason}" if wanted else f"plain torch: {reason}")
    if first.device.type == "cpu":
        return _INTERPRETED
    return _taken(torch.cuda.current_device() if first.device.index is None else first.device.index)


@cache
def units(device: torch.device) -> int:
    """Multiprocessors of a device; a small number in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
