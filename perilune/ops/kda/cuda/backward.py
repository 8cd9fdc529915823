"""The parallel part of the backward pass as one CUDA kernel: for which calls, and its launch. See backward.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel, Launch, unavailable_reason
from perilune.ops.kda.gpu.plan import CHUNK
from perilune.ops.triton.available import units

DIMS = (64, 128)
BETA_TYPES = (torch.bfloat16, torch.float32)


@cache
def kernel(
    key_dim: int,
    value_dim: int,
    l2: bool,
    a: bool,
    bias: bool,
    sigmoid: bool,
    wide: bool,
    beta_float: bool,
    bounded: bool,
) -> Kernel:
    """The kernel for these macros of backward.cu; its shared memory is `Shared` in backward_shared.h."""
    flags = {
        "L2": l2,
        "HAS_A": a,
        "HAS_BIAS": bias,
        "SIGMOID": sigmoid,
        "WIDE": wide,
        "BETA_FLOAT": beta_float,
        "BOUNDED": bounded,
    }
    k, v = CHUNK * key_dim * 2, CHUNK * value_dim * 2
    warps_across = key_dim // 32
    words = 19 * key_dim + 5 * CHUNK * warps_across + 5 * CHUNK + 4 * warps_across + 5 + 4 * key_dim
    return Kernel(
        Path(__file__).parent / "backward.cu",
        "backward",
        "P" * 19 + "f" * 3 + "i" * 15,
        threads=4 * key_dim,
        shared_bytes=5 * k + 3 * v + 4 * key_dim * value_dim + 4 * CHUNK * CHUNK + 4 * words,
        defines={"KEY_DIM": key_dim, "VALUE_DIM": value_dim} | {name: int(flag) for name, flag in flags.items()},
        early=True,
    )


def unsuitable(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, do: Tensor, *,
    gate: int, bounded: bool, l2: bool, sigmoid: bool,
) -> str | None:  # fmt: skip
    """Why the kernel does not take this call; None if it does. Arguments as in `launch`; gate 1 is the bounded gate, 2 softplus."""
    reason = unavailable_reason(q.device)
    if reason is not None:
        return reason
    if bounded != (gate == 1) or gate not in (1, 2):
        return "the CUDA kernel differentiates gates that are computed in it, and no others"
    if q.shape[-1] not in DIMS or do.shape[-1] not in DIMS:
        return f"the CUDA kernel needs K and V to be 64 or 128, not {q.shape[-1]} and {do.shape[-1]}"
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("do", do)):
        if x.dtype != torch.bfloat16:
            return f"the CUDA kernel reads bfloat16; {name} is {x.dtype}"
        if x.data_ptr() % 16 or any(s % 8 for s in x.stride()[:2]):
            return f"the CUDA kernel copies 16 bytes at a time; rows of {name} are not aligned to that"
    if beta.dtype not in BETA_TYPES:
        return f"the CUDA kernel reads beta as bfloat16 or float32, not {beta.dtype}"
    return _kernel_for(q, g, beta, A_log, dt_bias, do, l2, sigmoid, bounded).unavailable_reason(q.device)


def _kernel_for(
    q: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, do: Tensor, l2: bool, sigmoid: bool,
    bounded: bool,
) -> Kernel:  # fmt: skip
    wide, beta_float = q.shape[1] != g.shape[1], beta.dtype == torch.float32
    return kernel(
        g.shape[2], do.shape[2], l2, A_log is not None, dt_bias is not None, sigmoid, wide, beta_float, bounded
    )


def launch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, do: Tensor, U: Tensor,
    S: Tensor, E: Tensor, dS: Tensor, chunks: Tensor, dq: Tensor, dk: Tensor, dz: Tensor, dbeta: Tensor,
    dA: Tensor | None, bias: Tensor | None, *, scale: float, lower_bound: float, beta_scale: float, l2: bool, sigmoid: bool,
    bounded: bool = True,
) -> None:  # fmt: skip
    """Fill dq, dk, dz `[tokens, heads, K]`, dbeta `[tokens, heads]`, and a row a chunk of dA and bias.

    Args:
        q: as k, v, g, beta and do flattened, what `unsuitable` lets pass.
        A_log: `[heads]`.
        dt_bias: `[heads * K]`.
        U: `[chunks, heads, 64, V]`, with S and dS `[chunks, heads, V, K]` and E `[tokens, heads, V]` bfloat16.
        chunks: int32 `[chunks, 2]`, first token and number of tokens.
        dq: as dk of a value head; bfloat16, or float32 where several value heads share a head of q and k.
        dA: float32 `[chunks, heads]`.
        bias: float32 `[chunks, heads, K]`.
    """
    run = laid_out(
        q, k, v, g, beta, A_log, dt_bias, do, chunks.shape[0],
        scale=scale, lower_bound=lower_bound, beta_scale=beta_scale, l2=l2, sigmoid=sigmoid, bounded=bounded,
    )  # fmt: skip
    A_log, dt_bias = (None if x is None else x.float() for x in (A_log, dt_bias))
    if dt_bias is not None and dt_bias.data_ptr() % 16:
        dt_bias = dt_bias.clone()
    run(q, k, v, g, beta, A_log, dt_bias, do, U, S, E, dS, chunks, dq, dk, dz, dbeta, dA, bias)


def laid_out(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, do: Tensor,
    chunks: int, *, scale: float, lower_bound: float, beta_scale: float, l2: bool, sigmoid: bool, bounded: bool,
) -> Launch:  # fmt: skip
    """The launch for tensors that lie like these, in so many chunks. Its pointers as in backward.cu."""
    heads = g.shape[1]
    programs = chunks * heads
    return _kernel_for(q, g, beta, A_log, dt_bias, do, l2, sigmoid, bounded).fixed(
        q.device, (min(programs, units(q.device)),),
        scale, lower_bound, beta_scale, *(n for x in (q, k, v, g) for n in x.stride()[:2]), *beta.stride(),
        *do.stride()[:2], heads, heads // q.shape[1], programs,
    )  # fmt: skip
