"""A decode step as one CUDA kernel: for which calls, and its launch. See decode.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel, unavailable_reason
from perilune.ops.kda.arguments import L2_EPS
from perilune.ops.triton.available import units

DIMS = (64, 128)
MOST_RANK = 128  # of a decay whose logits the kernel makes itself,
MOST_ROWS = 32  # for so many rows at most: each reads the matrix again, if only from the L2 cache
STAGES = 3  # states in shared memory: one that is computed, two under way
GROUPS = 2  # in which the rows of a state arrive and leave


@cache
def kernel(
    key_dim: int,
    value_dim: int,
    taps: int,
    bounded: bool,
    a: bool,
    bias: bool,
    index: torch.dtype | None,
    by_head: bool,
    rank: int | None,
) -> Kernel:
    """The kernel for these macros; see decode.cu. rank: of a decay whose logits it makes itself."""
    flags = {
        "BOUNDED": bounded,
        "HAS_A": a,
        "HAS_BIAS": bias,
        "INDEXED": index is not None,
        "LONG": index == torch.int64,
        "BY_HEAD": by_head,
    }
    floats = STAGES * key_dim * value_dim + 3 * key_dim + value_dim + 8
    return Kernel(
        Path(__file__).parent / "decode.cu",
        "decode",
        "P" * 13 + "q" * 9 + "i" * 2 + "f" * 4,
        threads=256,
        shared_bytes=4 * floats,
        defines={
            "GROUPS": GROUPS,
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "TAPS": taps,
            "RANK": rank or 0,
        }
        | {n: int(f) for n, f in flags.items()},
        early=True,
    )


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel takes no activations of `dtype` on `device`; None if it does."""
    if dtype != torch.bfloat16:
        return f"the CUDA decode kernel reads bfloat16, not {str(dtype).removeprefix('torch.')}"
    return unavailable_reason(device)


def unsuitable(qkv: Tensor, window: Tensor, state: Tensor, taps: int) -> str | None:
    """Why the kernel does not take this call, whose activations are `readable`; None if it does."""
    for x in (qkv, window):
        if (reason := why_not(x.device, x.dtype)) is not None:
            return reason
    if any(size not in DIMS for size in state.shape[2:]):
        return f"the CUDA decode kernel needs K and V to be 64 or 128, not {state.shape[3]} and {state.shape[2]}"
    if state.stride()[2:] != (state.shape[3], 1) or window.stride(-1) != 1:
        return "the CUDA decode kernel needs the numbers of a head side by side"
    if taps < 2 or state.data_ptr() % 16 or any(step % 4 for step in state.stride()[:2]):
        return "the CUDA decode kernel needs a convolution of at least two taps and states aligned to 16 bytes"
    return None


def projects(decay_logit: Tensor, decay_up: Tensor) -> bool:
    """Whether the kernel makes the decay's logits out of these rows and this matrix."""
    rank = decay_up.shape[1]
    aligned = not (decay_logit.data_ptr() % 16 or decay_logit.stride(0) % 8 or decay_up.data_ptr() % 16)
    same = decay_up.dtype == decay_logit.dtype == torch.bfloat16 and decay_up.is_contiguous()
    return same and aligned and rank % 32 == 0 and rank <= MOST_RANK and len(decay_logit) <= MOST_ROWS


def decode_step(
    qkv: Tensor, conv_weight: Tensor, window: Tensor, decay_logit: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    beta_logit: Tensor, gate: Tensor, norm_weight: Tensor, state: Tensor, index: Tensor | None, heads: int, key_dim: int,
    lower_bound: float | None, scale: float, norm_eps: float, *, by_head: bool = False, decay_up: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Launch the kernel; arguments as `kda_decode_step`, in the layout that it has checked and `unsuitable` lets pass.

    by_head: window is `[slots, H, (2K+V)(W-1)]`, and window and state may be strided over slots and heads.
    decay_up: see `kda_decode_pages`; `projects` has nothing to say against it.
    """
    batch, value_dim = qkv.shape[0], norm_weight.shape[0]
    out = torch.empty(batch, heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    if batch == 0:
        return out
    strides = [x.numel() // batch if x.is_contiguous() else x.stride(0) for x in (qkv, decay_logit, beta_logit, gate)]
    strides += [*state.stride()[:2], *window.stride()[:2]]
    run = kernel(
        key_dim, value_dim, conv_weight.shape[1], lower_bound is not None, A_log is not None, dt_bias is not None,
        None if index is None else index.dtype, by_head, None if decay_up is None else decay_up.shape[1],
    )  # fmt: skip
    programs = batch * heads
    run.launch(
        (min(programs, units(qkv.device)),), qkv, conv_weight, window, decay_logit, decay_up, A_log, dt_bias, beta_logit, gate,
        norm_weight, state, index, out, *strides, state.shape[0], heads, programs, scale, lower_bound or 0.0, norm_eps, L2_EPS,
    )  # fmt: skip
    return out
