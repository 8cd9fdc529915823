"""What a C kernel needs from torch: plain tensors, and torch's own fp32 matrix product.

Torch's CPU library exports the Fortran symbol `sgemm_` of the BLAS it was built with; kernels receive its address and
call it inside their parallel loops. There that BLAS runs on the calling thread, so one loop over experts or heads keeps
all cores busy where single products are too small to be divided.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def why_not_plain(*tensors: Tensor) -> str | None:
    """Return why a C kernel cannot read these tensors' memory, or None if it can."""
    for tensor in tensors:
        if not tensor.is_cpu:
            return f"the C kernels run on CPU, the input is on {tensor.device.type}"
        if type(tensor) not in (Tensor, Parameter):
            return f"the C kernels need plain tensors, not {type(tensor).__name__}"
    return "the call is being traced by torch.compile" if torch.compiler.is_compiling() else None


@lru_cache
def multiplies_bf16() -> bool:
    """True if this CPU multiplies bf16 matrices in hardware; without it, torch's bf16 product is far below fp32's."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@lru_cache
def sgemm_address() -> int:
    """Address of the Fortran sgemm inside torch's own libraries, after a trial; 0 if there is none."""
    folder = Path(torch.__file__).parent / "lib"
    for path in (folder / "libtorch_cpu.so", folder / "libtorch_cpu.dylib"):
        try:
            found = ctypes.CDLL(str(path)).sgemm_
        except (OSError, AttributeError):
            continue
        return (ctypes.cast(found, c_void_p).value or 0) if _multiplies(found) else 0
    return 0


def _multiplies(sgemm: Any) -> bool:
    """Check the calling convention on C = A B^T: a build with 64-bit integers would read wrong sizes."""
    a, b = torch.tensor([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]]), torch.tensor([[13.0, 17.0], [19.0, 23.0]])
    c = torch.full((3, 2), float("nan"))
    m, n, k = (ctypes.byref(ctypes.c_int64(size)) for size in (3, 2, 2))  # high halves are zero: both widths read it
    one, zero = ctypes.byref(c_float(1)), ctypes.byref(c_float(0))
    sgemm.restype = None
    sgemm(
        ctypes.c_char_p(b"T"), ctypes.c_char_p(b"N"), n, m, k, one, c_void_p(b.data_ptr()), k, c_void_p(a.data_ptr()), k,
        zero, c_void_p(c.data_ptr()), n, ctypes.c_size_t(1), ctypes.c_size_t(1),
    )  # fmt: skip
    return torch.equal(c, a @ b.T)


def why_no_blas() -> str | None:
    """Return why the C kernels cannot use torch's matrix product, or None if they can."""
    return None if sgemm_address() else "torch's library does not export sgemm_ in a form the C path can call"
