"""Calling the row kernels of this folder: when they can run, how tensors become pointers, how work is divided.

Shared by every operation whose native form is in `elementwise.c` or `attnres.c`. A row kernel sees a tensor `[..., D]`
as `rows` contiguous rows of D elements, a fixed stride apart.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

from perilune.ops.choice import Choice, forced
from perilune.ops.native import build

PARALLEL_ELEMENTS = 1 << 15  # below this, waking a second thread costs more than it saves
MAX_BLOCKS = 64
BLOCK_ROWS = 16

# Libraries in use: asking `build` again would cost a decode step more than the kernels themselves.
_loaded: dict[str, ctypes.CDLL] = {}
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_ARGUMENT = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "f": ctypes.c_float, "i": ctypes.c_int}
_NATIVE = Choice("native", "CPU tensors in float32 or bfloat16")
_REFERENCE = Choice("reference", "asked for")
_TORCH = Choice("torch", "asked for")


def choose(library: str, *activations: Tensor) -> Choice:
    """Say whether the kernels of `library` can take these activations, and if not, why the torch path runs.

    Args:
        library: name of the C file, without suffix.
        activations: tensors that must share one of the kernels' element types (float32, bfloat16) and be on the CPU.
    """
    wanted = forced()
    if wanted is None and library in _loaded and len(activations) == 1:
        x = activations[0]  # what a decode step asks hundreds of times a token
        if type(x) is Tensor and x.dtype in _SUFFIX and x.is_cpu and not torch.compiler.is_compiling():
            return _NATIVE
    if wanted == "reference":
        return _REFERENCE
    if wanted == "torch":
        return _TORCH
    if wanted == "triton":
        return Choice("torch", "triton was asked for, but this operation has no triton implementation")
    reason = _obstacle(library, activations)
    return _NATIVE if reason is None else Choice("torch", reason)


def _obstacle(library: str, activations: tuple[Tensor, ...]) -> str | None:
    dtype = activations[0].dtype
    if dtype not in _SUFFIX:
        return f"native kernels take float32 and bfloat16, not {dtype}"
    for x in activations:
        if not x.is_cpu:
            return f"native kernels run on the CPU, the tensor is on {x.device.type}"
        if type(x) is not Tensor and type(x) is not Parameter:
            return f"native kernels need plain tensors, not {type(x).__name__}"
        if x.dtype != dtype:
            return f"native kernels need one element type, not {dtype} and {x.dtype}"
    if torch.compiler.is_compiling():
        return "the call is being traced by torch.compile, which native kernels are invisible to"
    if library not in _loaded:
        reason = build.unavailable_reason(library)
        if reason is not None:
            return reason
        _loaded[library] = build.load(library)
    return None


@cache
def entry(library: str, function: str, dtype: torch.dtype, arguments: str) -> Callable[..., None]:
    """Return the C function `<function>_<element type>` of a library that `choose` found, with its argument types set.

    Args:
        arguments: one letter an argument: p pointer (an int; None is NULL), l int64, f float, i int.
    """
    found = getattr(_loaded[library], f"{function}_{_SUFFIX[dtype]}")
    found.argtypes = [_ARGUMENT[letter] for letter in arguments]
    found.restype = None
    return found


def as_rows(x_ND: Tensor) -> tuple[Tensor, int]:
    """View `[..., D]` as rows; return a tensor that owns or shares them, and the elements from one row to the next.

    Copies only where the rows are not contiguous or not evenly spaced. The caller must keep the returned tensor alive
    while a kernel reads its `data_ptr()`.
    """
    width = x_ND.shape[-1]
    if x_ND.is_contiguous():
        return x_ND, width
    flat = x_ND.reshape(-1, width)
    if flat.stride(-1) != 1 and width > 1:
        return flat.contiguous(), width
    return flat, flat.stride(0)


def fresh(x: Tensor) -> Tensor:
    """An uninitialised contiguous tensor of x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def parameter(weight: Tensor) -> Tensor:
    """Return the float32, contiguous form of a parameter that kernels read (the tensor itself where it is that)."""
    if weight.dtype is torch.float32 and weight.is_contiguous():
        return weight
    return weight.detach().to(torch.float32).contiguous()


def threads_for(elements: int) -> int:
    """Threads that a kernel over this many elements should use."""
    return 1 if elements < PARALLEL_ELEMENTS else torch.get_num_threads()


def blocks_for(rows: int) -> int:
    """Groups of rows whose shares of a parameter's gradient are summed apart: a function of the size alone, so that the
    result does not depend on the number of threads."""
    return min(MAX_BLOCKS, max(1, -(-rows // BLOCK_ROWS)))
