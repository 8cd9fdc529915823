"""Which form of the decode and verify kernels runs on a CUDA device.

Whole heads (`triton_decode`, `triton_verify`): one program holds a head's state. Measured on one H200.
Slices (`triton_slices`, `triton_verify_slices`): programs of one warp, several a head, that meet at the output norm. Made to
overlap reading and writing; equal to the other form in the interpreter, not yet run on a GPU. tests/gpu and the
benchmark rows take both; when they agree and slices are faster, this switch goes and the slower form with it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

SLICES = False


def decode_step() -> Callable[..., Tensor]:
    """The launch function of a decode step."""
    if SLICES:
        from perilune.ops.kda.triton_slices import decode_step as step
    else:
        from perilune.ops.kda.triton_decode import decode_step as step
    return step


def verify_step() -> Callable[..., Tensor]:
    """The launch function of a verify step."""
    if SLICES:
        from perilune.ops.kda.triton_verify_slices import verify_step as step
    else:
        from perilune.ops.kda.triton_verify import verify_step as step
    return step
