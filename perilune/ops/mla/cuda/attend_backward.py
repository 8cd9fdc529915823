"""The backward pass of `attend` as three CUDA kernels: what is known of a query; dq; dk and dv. See the .cu files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel
from perilune.ops.mla.cuda.attend import ALIGNMENT, KEYS, QUERIES
from perilune.ops.triton.sizes import blocks

FOLDER = Path(__file__).parent
CHUNK_BYTES = 8192  # of 64 rows of 64 channels
PLACES = 3  # for blocks that are being copied or multiplied
BLOCK = 64  # rows of one
STATS_WARPS = 4  # heads of a block


@cache
def stats_kernel(value: int, wide_out: bool, wide_dout: bool) -> Kernel:
    """The kernel of <do, o>, and of `dout` in bfloat16."""
    defines = {"KEY": 64, "VALUE": value, "WIDE_OUT": int(wide_out), "WIDE_DOUT": int(wide_dout)}
    return Kernel(FOLDER / "attend_stats.cu", "attend_stats", "PPPPPqqqiii", threads=32 * STATS_WARPS, defines=defines)


@cache
def queries_kernel(key: int, value: int) -> Kernel:
    """The kernel of dq."""
    chunks = blocks(key, 64) + blocks(value, 64)
    return Kernel(
        FOLDER / "attend_queries.cu", "attend_queries", "P" * 7 + "q" * 12 + "iiiiiff", threads=384,
        shared_bytes=CHUNK_BYTES * chunks * (2 + PLACES) + 16 * PLACES, defines={"KEY": key, "VALUE": value},
    )  # fmt: skip


@cache
def keys_kernel(key: int, value: int) -> Kernel:
    """The kernel of dk and dv."""
    chunks = blocks(key, 64) + blocks(value, 64)
    return Kernel(
        FOLDER / "attend_keys.cu", "attend_keys", "P" * 9 + "q" * 12 + "iiiiiff", threads=384,
        shared_bytes=CHUNK_BYTES * chunks * (2 + PLACES) + (8 * BLOCK + 16) * PLACES, defines={"KEY": key, "VALUE": value},
    )  # fmt: skip


def readable(dout: Tensor) -> Tensor:
    """`dout`, or a copy whose rows the kernels can read."""
    numbers = ALIGNMENT // dout.element_size()
    fits = (
        dout.stride(-1) == 1 and not any(n % numbers for n in dout.stride()[:-1]) and dout.data_ptr() % ALIGNMENT == 0
    )
    return dout if fits else dout.contiguous()


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, dout: Tensor, scale: float, factor: float, first: Tensor | None,
    end: Tensor | None, past: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v, bfloat16 and dense.

    Args:
        q, k, v, out, logs: operands and results of `attend.attend`, with logs.
        dout: `[B, T, H, V]`, float32 or bfloat16, `readable`.
        scale, factor: on the scores; the latter to base 2.
        first, end: int32 `[T]`: of each token the first one of its document, and the first behind it; or None.
        past: keys before the first query.
    """
    batch, tokens, heads, width = q.shape
    value = v.shape[3]
    pitch = blocks(tokens, QUERIES) * QUERIES
    known = torch.empty(batch, heads, pitch, 2, dtype=torch.float32, device=q.device)
    wide = dout.dtype == torch.float32
    narrow = torch.empty(out.shape, dtype=q.dtype, device=q.device) if wide else None
    stats_kernel(value, out.dtype == torch.float32, wide).launch(
        (pitch, blocks(heads, STATS_WARPS), batch),
        out,
        dout,
        logs,
        known,
        narrow,
        *dout.stride()[:3],
        tokens,
        heads,
        pitch,
    )
    dout = dout if narrow is None else narrow
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    strides = [step for x in (q, k, v, dout) for step in x.stride()[:3]]
    numbers = (tokens, k.shape[1], past, heads, pitch, factor, scale)
    keys_kernel(width, value).launch(
        (blocks(k.shape[1], KEYS), heads, batch), q, k, v, dout, first, end, known, dk, dv, *strides, *numbers
    )
    queries_kernel(width, value).launch(
        (pitch // QUERIES, heads, batch), q, k, v, dout, first, known, dq, *strides, *numbers
    )
    return dq, dk, dv
