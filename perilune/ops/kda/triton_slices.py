"""What the verify kernel does for a token: a program is one warp and takes a slice of ROWS value channels of one sequence
and head, reads ROWS x K numbers of state once, keeps them in registers, and writes them once.

In registers a slice is [ROWS, KO, KI] with k = ko * KI + ki: eight lanes share 128 bytes of a row and the pieces of a row
lie in one thread, so a sum over k takes three shuffles for four rows instead of five for one. Both sums over k that a
token needs are taken from the decayed state before the write: S' q = S q + u (k . q).

What the slices of a head share is little: the norm of the output. Each leaves its outputs and their sums of squares in a
scratch buffer and takes a ticket; the program that takes the last one normalises. Which that is does not change a bit.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.kda.triton_decode import INNER
from perilune.ops.triton.gates import silu
from perilune.ops.triton.sizes import blocks, power_of_two

ROWS = 16  # of a slice


@triton.jit
def load_weights(weight, channel, mask, W: tl.constexpr):
    """The convolution's W weights of some channels."""
    loaded = ()
    for j in tl.static_range(W):
        loaded = loaded + (tl.load(weight + channel * W + j, mask, 0.0),)
    return loaded


@triton.jit
def convolve(raw, weights):
    """SiLU of the convolution over the taps."""
    total = raw[0] * weights[0]
    for j in tl.static_range(1, len(raw)):
        total = tl.fma(raw[j], weights[j], total)
    return silu(total)


@triton.jit
def write(S, v, beta, k):
    """S + beta (v - S k) k^T for a decayed S [ROWS, KO, KI]; also u = beta (v - S k)."""
    u = beta * (v - tl.sum(tl.sum(S * k[None, :, :], 1), 1))
    return tl.fma(tl.broadcast_to(u[:, None, None], S.shape), tl.broadcast_to(k[None, :, :], S.shape), S), u


@triton.jit
def advance(S, q, k, v, alpha, beta, scale):
    """One token: S decayed and corrected, and the outputs [ROWS] that q reads from it."""
    S = S * alpha[None, :, :]
    read = tl.sum(tl.sum(S * q[None, :, :], 1), 1)
    S, u = write(S, v, beta, k)
    return S, scale * (read + u * tl.sum(tl.sum(k * q, 0), 0))


def tile(key_dim: int, value_dim: int, rows: int | None = None, num_warps: int | None = None) -> dict[str, int]:
    """Sizes of a program's tiles: powers of two around K and V, and the slices of V."""
    columns, whole = power_of_two(key_dim), power_of_two(value_dim)
    inner = min(INNER, columns)
    rows = min(rows or ROWS, whole)
    slices = blocks(value_dim, rows)
    return {
        "KO": columns // inner,
        "KI": inner,
        "ROWS": rows,
        "SLICES": slices,
        "SP": power_of_two(slices),
        "BV": whole,
        "num_warps": num_warps or 1,
    }


_tickets: dict[tuple[int, int], Tensor] = {}


def tickets(device: torch.device, count: int) -> Tensor:
    """`count` zeros that every launch leaves as zeros. Kept for each stream: launches that overlap must not share them;
    so graphs that were captured on one stream must not be replayed side by side."""
    on_gpu = device.type == "cuda"
    key = (device.index or 0, torch.cuda.current_stream(device).cuda_stream) if on_gpu else (-1, 0)
    kept = _tickets.get(key)
    if kept is None or kept.numel() < count:
        kept = torch.zeros(max(count, 1 << 16), dtype=torch.int32, device=device)
        if not (on_gpu and torch.cuda.is_current_stream_capturing()):  # else it is the graph's, zeroed at each replay
            _tickets[key] = kept
    return kept
