"""`prepare` as a CUDA kernel: when it can run, and its launch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from perilune.ops.choice import Choice
from perilune.ops.cuda import Kernel, Launch

if TYPE_CHECKING:
    from perilune.ops.kda.gpu.forward import Prepared, Setting

THREADS = 256
BLOCKS = 3  # that share a multiprocessor: limits registers
UNBOUNDED_BLOCKS = 2  # where the decay has no bound
KEY_DIMS = (64, 128)
ALIGNMENT = 16  # bytes of a load
FARTHEST = 2**25  # bytes between tokens, of which 64 are counted in 32 bits
_FAR = "the CUDA kernel takes tokens that lie less than 32 MiB apart"
LOG2E = 1.4426950408889634
_L2_NORM, _GATE, _BETA_SIGMOID, _BETA_FLOAT, _WHOLE = 1, 2, 4, 8, 16


@cache
def kernel(key_dim: int, float_gate: bool, full: bool, bounded: bool) -> Kernel:
    """The kernel for K channels and a float32 or bfloat16 g; `full`: as `Plan.full`; `bounded`: whether the decay is."""
    return Kernel(
        Path(__file__).parent / "prepare.cu",
        "prepare",
        "P" * 14 + "f" * 4 + "q" * 4 + "i" * 7,
        threads=THREADS,
        shared_bytes=_shared_bytes(key_dim, bounded),
        defines={
            "K": key_dim,
            "BLOCKS": BLOCKS if bounded else UNBOUNDED_BLOCKS,
            "G_FLOAT": int(float_gate),
            "FULL": int(full),
            "BOUNDED": int(bounded),
        },
        early=True,
    )


def _shared_bytes(key_dim: int, bounded: bool) -> int:
    """As laid out in prepare_layout.h, and prepare_unbounded.h."""
    sums = max(4 * 64 * (key_dim + 4), 16_384 + 2 * 64 * 72)
    units, keys, parts = 4 * 64, 96 * (2 * key_dim + 64), 4 * 6 * THREADS
    return 1152 + 16 * key_dim + sums + max(4 * 64 * key_dim, 4 * 64 * 80) + (0 if bounded else units + keys + parts)


def select(device: torch.device | str, *dtypes: torch.dtype) -> Choice:
    """Which form of the stage `chunk_kda` runs on a GPU for inputs of these dtypes, and why."""
    device = torch.device(device)
    if device.type != "cuda":
        return Choice("torch", "a stage of chunk_kda's GPU kernels; elsewhere chunk_kda has no stages")
    if any(dtype != torch.bfloat16 for dtype in dtypes):
        return Choice("triton", "Triton kernel: the CUDA kernel takes q and k in bfloat16")
    reason = kernel(KEY_DIMS[-1], False, False, True).unavailable_reason(device)
    if reason is not None:
        return Choice("triton", f"Triton kernel: {reason}")
    return Choice("cuda", "one CUDA kernel, triangular inverse included; other calls take the Triton kernel")


def unsuitable(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, s: Setting, full: bool = False) -> str | None:
    """Why the kernel does not take this call (inputs flattened, see `run`); None if it does and is ready to run."""
    if q.dtype != torch.bfloat16 or k.dtype != torch.bfloat16:
        return f"the CUDA kernel takes q and k in bfloat16, not {_name(q.dtype)} and {_name(k.dtype)}"
    if g.dtype not in (torch.bfloat16, torch.float32) or beta.dtype not in (torch.bfloat16, torch.float32):
        return f"the CUDA kernel takes g and beta in bfloat16 or float32, not {_name(g.dtype)} and {_name(beta.dtype)}"
    if q.shape[-1] not in KEY_DIMS:
        return f"the CUDA kernel is written for K of 64 or 128, not {q.shape[-1]}"
    for x in (q, k, g):
        token, head = (n * x.element_size() for n in x.stride()[:2])
        if token >= FARTHEST:
            return _FAR
        if (x.data_ptr() | token | head) % ALIGNMENT:
            return "the CUDA kernel copies 16 bytes at a time: q, k and g must begin, and their rows lie, at multiples of that"
    if beta.stride(0) * beta.element_size() >= FARTHEST:
        return _FAR
    return kernel(q.shape[-1], g.dtype == torch.float32, full, s.bounded).unavailable_reason(q.device)


def run(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, chunks: Tensor,
    s: Setting, out: Prepared, whole: bool, full: bool = False,
) -> None:  # fmt: skip
    """Fill `out`. q, k `[tokens, H, K]`, g `[tokens, HV, K]`, beta `[tokens, HV]`; chunks and full as in `Plan`.

    Of P and A blocks of 16 above the diagonal only if `whole`; the serial CUDA kernels do not read them.
    """
    A_log, dt_bias = (None if x is None else x.float().contiguous() for x in (A_log, dt_bias))
    laid_out(q, k, g, beta, chunks.shape[0], s, whole, full)(q, k, g, beta, A_log, dt_bias, chunks, *out)


def laid_out(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, chunks: int, s: Setting, whole: bool, full: bool
) -> Launch:  # fmt: skip
    """The launch for tensors that lie like these, in so many chunks; its pointers as in prepare.cu."""
    heads, key_dim = g.shape[1:]
    flags = (
        _L2_NORM * s.l2_norm
        | _GATE * (s.gate != 0)
        | _BETA_SIGMOID * s.beta_sigmoid
        | _BETA_FLOAT * (beta.dtype == torch.float32)
        | _WHOLE * whole
    )
    strides = [x.stride() for x in (q, k, g, beta)]
    return kernel(key_dim, g.dtype == torch.float32, full, s.bounded).fixed(
        q.device, (chunks * heads,),
        s.scale, s.lower_bound, -0.5 * s.lower_bound * LOG2E, s.beta_scale,
        *(n[1] for n in strides), *(n[0] for n in strides), heads, heads // q.shape[1], flags,
    )  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
