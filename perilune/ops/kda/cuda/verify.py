"""A verify step as one CUDA kernel: for which calls, and its launch. See verify.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel
from perilune.ops.kda.arguments import L2_EPS
from perilune.ops.kda.cuda import decode
from perilune.ops.kda.verify import Projections
from perilune.ops.triton.available import units

MOST_TOKENS = 24  # of both windows: what fits into shared memory beside two states
STAGES = 2


@cache
def kernel(
    key_dim: int, value_dim: int, taps: int, pending: int, new: int, bounded: bool, a: bool, bias: bool,
    index: torch.dtype | None, count: torch.dtype | None,
) -> Kernel:  # fmt: skip
    """The kernel for these macros; see verify.cu."""
    flags = {
        "BOUNDED": bounded,
        "HAS_A": a,
        "HAS_BIAS": bias,
        "INDEXED": index is not None,
        "LONG": index == torch.int64,
    }
    sizes = {"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "TAPS": taps, "OLD_TOKENS": pending, "NEW_TOKENS": new}
    tokens = pending + new
    floats = STAGES * key_dim * value_dim + tokens * (3 * key_dim + value_dim + 4) + new * value_dim
    return Kernel(
        Path(__file__).parent / "verify.cu",
        "verify",
        "P" * 16 + "q" * 15 + "i" * 2 + "f" * 4,
        threads=256,
        shared_bytes=4 * floats,
        defines=sizes | {n: int(f) for n, f in flags.items()} | {"LONG_COUNT": int(count == torch.int64)},
    )


def unsuitable(new: Projections, pending: Projections | None, window: Tensor, state: Tensor, taps: int) -> str | None:
    """Why the kernel does not take this call, whose layout was checked; None if it does."""
    tokens = new.qkv_BTX.shape[1] + (0 if pending is None else pending.qkv_BTX.shape[1])
    if tokens > MOST_TOKENS:
        return f"the CUDA verify kernel takes at most {MOST_TOKENS} tokens, not {tokens}"
    if not state.is_contiguous() or not window.is_contiguous():
        return "the CUDA verify kernel needs dense states and windows"
    return decode.unsuitable(new.qkv_BTX, window, state, taps)


def verify_step(
    new: Projections, gate: Tensor, pending: Projections | None, accepted: Tensor | None, conv_weight: Tensor,
    A_log: Tensor | None, dt_bias: Tensor | None, norm_weight: Tensor, window: Tensor, state: Tensor, index: Tensor | None,
    heads: int, key_dim: int, lower_bound: float | None, scale: float, norm_eps: float,
) -> Tensor:  # fmt: skip
    """Launch the kernel; arguments as `kda_verify_step`, in the layout that it has checked and `unsuitable` lets pass."""
    batch, length, _ = new.qkv_BTX.shape
    value_dim = norm_weight.shape[0]
    out = torch.empty(batch, length, heads * value_dim, dtype=new.qkv_BTX.dtype, device=state.device)
    if batch == 0:
        return out
    old = (None, None, None) if pending is None else pending
    run = kernel(
        key_dim, value_dim, conv_weight.shape[1], 0 if pending is None else pending.qkv_BTX.shape[1], length,
        lower_bound is not None, A_log is not None, dt_bias is not None, None if index is None else index.dtype,
        None if accepted is None else accepted.dtype,
    )  # fmt: skip
    strides = [step for x in (*new, gate) for step in x.stride()[:2]]
    strides += [step for x in old for step in ((0, 0) if x is None else x.stride()[:2])]
    programs = batch * heads
    run.launch(
        (min(programs, units(state.device)),), *new, gate, *old, accepted, conv_weight, A_log, dt_bias, norm_weight, window,
        state, index, out, *strides, state.shape[0], heads, programs, scale, lower_bound or 0.0, norm_eps, L2_EPS,
    )  # fmt: skip
    return out
