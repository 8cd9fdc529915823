"""Folding and scoring of drafts as one CUDA kernel: for which calls, and its launch. See verify.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel
from perilune.ops.kda.arguments import L2_EPS
from perilune.ops.kda.cuda.decode import DIMS, why_not

if TYPE_CHECKING:
    from perilune.ops.kda.verify import Projections

MOST_FOLDED, MOST_SCORED = 9, 9  # tokens of a pending and of a new window


@cache
def kernel(
    key_dim: int,
    value_dim: int,
    taps: int,
    bounded: bool,
    a: bool,
    bias: bool,
    index: torch.dtype | None,
    counts: torch.dtype | None,
) -> Kernel:
    """The kernel for these macros; see verify.cu."""
    flags = {
        "BOUNDED": bounded,
        "HAS_A": a,
        "HAS_BIAS": bias,
        "INDEXED": index is not None,
        "LONG": index == torch.int64,
        "LONG_COUNTS": counts == torch.int64,
    }
    places, listed, threads = MOST_FOLDED + MOST_SCORED, MOST_FOLDED + 2 * MOST_SCORED, 2 * value_dim
    floats = value_dim * (key_dim + 1) + listed * (key_dim + 16) + places * (value_dim + 4 + key_dim)
    floats += (MOST_FOLDED + 1) * key_dim + 32 * (places + 1 + key_dim // 64) + 18 * 24 + 20 + 8 * MOST_SCORED
    return Kernel(
        Path(__file__).parent / "verify.cu",
        "verify",
        "P" * 16 + "q" * 15 + "i" * 3 + "f" * 4,
        threads=threads,
        shared_bytes=-(-4 * floats // 16) * 16,
        defines={"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "TAPS": taps} | {n: int(f) for n, f in flags.items()},
    )


def unsuitable(
    new: Projections, gate: Tensor, pending: Projections | None, window: Tensor, state: Tensor, taps: int
) -> str | None:
    """Why the kernel does not take this call, whose tensors are `readable`; None if it does."""
    for x in (gate, window):
        if (reason := why_not(x.device, x.dtype)) is not None:
            return reason
    if any(size not in DIMS for size in state.shape[2:]):
        return f"the CUDA verify kernel needs K and V to be 64 or 128, not {state.shape[3]} and {state.shape[2]}"
    old = 0 if pending is None else pending.qkv_BTX.shape[1]
    if old > MOST_FOLDED or new.qkv_BTX.shape[1] > MOST_SCORED:
        return f"the CUDA verify kernel folds {MOST_FOLDED} and scores {MOST_SCORED} tokens at most, not {old} and {new.qkv_BTX.shape[1]}"
    pairs = [x for part in (new, pending) if part is not None for x in (part.qkv_BTX, part.decay_logit_BTHK)]
    if any(x.data_ptr() % 4 or x.stride(0) % 2 or x.stride(1) % 2 for x in pairs):
        return "the CUDA verify kernel reads two channels at a time: rows must begin at even numbers"
    if taps < 2 or state.data_ptr() % 16:
        return "the CUDA verify kernel needs a convolution of at least two taps and states aligned to 16 bytes"
    return None


def verify_step(
    new: Projections, gate: Tensor, pending: Projections | None, accepted: Tensor | None, conv_weight: Tensor,
    A_log: Tensor | None, dt_bias: Tensor | None, norm_weight: Tensor, window: Tensor, state: Tensor, index: Tensor | None,
    heads: int, key_dim: int, lower_bound: float | None, scale: float, norm_eps: float,
) -> Tensor:  # fmt: skip
    """Launch the kernel; arguments as `kda_verify_step`, in the layout that it has checked and `unsuitable` lets pass."""
    batch, count, _ = new.qkv_BTX.shape
    value_dim = norm_weight.shape[0]
    out = torch.empty(batch, count, heads * value_dim, dtype=new.qkv_BTX.dtype, device=new.qkv_BTX.device)
    old = (None,) * 3 if pending is None else pending
    tensors = (*new, gate, *old)
    strides = [step for x in tensors for step in ((0, 0) if x is None else x.stride()[:2])]
    run = kernel(
        key_dim, value_dim, conv_weight.shape[1], lower_bound is not None, A_log is not None, dt_bias is not None,
        None if index is None else index.dtype, None if accepted is None else accepted.dtype,
    )  # fmt: skip
    run.launch(
        (heads, batch), *tensors, accepted, conv_weight, A_log, dt_bias, norm_weight, window, state, index, out, *strides,
        state.shape[0], heads, count, 0 if pending is None else pending.qkv_BTX.shape[1], scale, lower_bound or 0.0, norm_eps,
        L2_EPS,
    )  # fmt: skip
    return out
