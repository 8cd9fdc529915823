"""`keys.keys_and_values` on a CUDA device: one pass each way. A program takes some tokens; backward it walks over the heads and
sums the gradient of what they share in float32, in their order."""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.triton.products import trips
from perilune.ops.triton.sizes import blocks, power_of_two

TOKENS, WARPS = 16, 4  # of a program


@triton.jit
def _join_kernel(
    kv, shared, shared_t, k, tokens, H, N: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)[:, None]
    head, n, r = tl.program_id(1), tl.arange(0, BN)[None, :], tl.arange(0, BR)[None, :]
    row, there = t * H + head, t < tokens
    tl.store(k + row * (N + R) + n, tl.load(kv + row * (N + V) + n, there & (n < N)), there & (n < N))
    tl.store(k + row * (N + R) + N + r, tl.load(shared + t * shared_t + r, there & (r < R)), there & (r < R))


@triton.jit
def _part_kernel(
    dk, dv, dv_t, dv_h, dkv, dshared, tokens, H, N: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)[:, None]
    n, r, v = tl.arange(0, BN)[None, :], tl.arange(0, BR)[None, :], tl.arange(0, BV)[None, :]
    there = t < tokens
    total = tl.zeros([BT, BR], tl.float32)
    for head in range(trips(H)):
        row = t * H + head
        tl.store(dkv + row * (N + V) + n, tl.load(dk + row * (N + R) + n, there & (n < N)), there & (n < N))
        value = tl.load(dv + t * dv_t + head * dv_h + v, there & (v < V))
        tl.store(dkv + row * (N + V) + N + v, value, there & (v < V))
        total += tl.load(dk + row * (N + R) + N + r, there & (r < R), 0.0).to(tl.float32)
    tl.store(dshared + t * R + r, total.to(dshared.dtype.element_ty), there & (r < R))


def keys_and_values(kv_BTHC: Tensor, shared_BTr: Tensor, content: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a dense `kv`, differentiable."""
    if torch.is_grad_enabled() and (kv_BTHC.requires_grad or shared_BTr.requires_grad):
        return _Keys.apply(kv_BTHC, shared_BTr, content)
    return join(kv_BTHC, shared_BTr, content), kv_BTHC[..., content:]


class _Keys(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv_BTHC, shared_BTr, content):
        ctx.content, ctx.width = content, kv_BTHC.shape[-1]
        return join(kv_BTHC, shared_BTr, content), kv_BTHC[..., content:]

    @staticmethod
    @once_differentiable
    def backward(ctx, dk, dv):
        return *part(dk.contiguous(), dv if dv.stride(-1) == 1 else dv.contiguous(), ctx.content), None


def join(kv_BTHC: Tensor, shared_BTr: Tensor, content: int) -> Tensor:
    """Launch the forward kernel: keys `[B, T, H, n + r]`."""
    batch, length, heads, width = kv_BTHC.shape
    shared = shared_BTr.flatten(0, 1)
    shared, r = shared if shared.stride(1) == 1 else shared.contiguous(), shared.shape[1]
    k = torch.empty(batch, length, heads, content + r, dtype=kv_BTHC.dtype, device=kv_BTHC.device)
    if k.numel():
        _join_kernel[(blocks(batch * length, TOKENS), heads)](
            kv_BTHC, shared, shared.stride(0), k, batch * length, heads, N=content, R=r, V=width - content,
            BN=power_of_two(content), BR=power_of_two(r), BT=TOKENS, num_warps=WARPS,
        )  # fmt: skip
    return k


def part(dk_BTHK: Tensor, dv_BTHV: Tensor, content: int) -> tuple[Tensor, Tensor]:
    """Launch the backward kernel: the gradients of kv and of what the heads share. dk is dense, dv's last axis is."""
    batch, length, heads, keys = dk_BTHK.shape
    value, r = dv_BTHV.shape[-1], keys - content
    dv = dv_BTHV.flatten(0, 1)
    dkv = torch.empty(batch, length, heads, content + value, dtype=dk_BTHK.dtype, device=dk_BTHK.device)
    dshared = torch.empty(batch, length, r, dtype=dk_BTHK.dtype, device=dk_BTHK.device)
    if dshared.numel():
        _part_kernel[(blocks(batch * length, TOKENS),)](
            dk_BTHK, dv, *dv.stride()[:2], dkv, dshared, batch * length, heads, N=content, R=r, V=value,
            BN=power_of_two(content), BR=power_of_two(r), BV=power_of_two(value), BT=TOKENS, num_warps=WARPS,
        )  # fmt: skip
    return dkv, dshared
