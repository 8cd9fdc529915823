"""Routing on a CUDA device: scores, top-(k+1), weights and counts in one launch; the weights' gradient in another.

A program takes a token, whose E keys lie in the registers of a warp or two. Not every key has to be sorted: of the largest key of
each of 32 groups, the (k+1)-th is a bound that at least k+1 keys reach, and seldom more than two dozen. These few are
written side by side, read back, and each is ranked by counting the larger ones. Where more than LIMIT keys reach the
bound (many equal scores), k+1 rounds of a maximum find the same.

A key is the biased score's bits as an ordered integer, above the expert's number counted down: so keys are distinct, equal
scores go to the lower expert, and NaN counts as largest, as in `torch.sort`.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.triton.gates import sigmoid
from perilune.ops.triton.sizes import power_of_two

SMALL = 64  # up to so many keys all are ranked
LIMIT = 32  # of more keys, those that are ranked: two dozen reach the bound, more than this in one token of a hundred
GROUPS = tl.constexpr(32)
LARGEST_K = 31  # k + 1 groups are needed for the bound
WARP = 512  # keys a warp
_LOWEST = tl.constexpr(-(2**31))
_NOTHING = tl.constexpr(-(2**63))
_ANYTHING = tl.constexpr(2**63 - 1)


@triton.jit
def _ordered(bits):
    """A float's bits as an integer of the same order; its own inverse."""
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _numbered(key, expert):
    """The key above, the expert's number counted down below: distinct, and equal scores go to the lower expert."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - expert).to(tl.int64)


@triton.jit
def _bound(key, K: tl.constexpr, BE: tl.constexpr):
    """A number that at least K + 1 keys reach: the (K + 1)-th largest of the groups' maxima."""
    most = tl.max(tl.max(tl.reshape(key, [BE // (4 * GROUPS), GROUPS, 4]), 2), 0)
    above = tl.sum((most[None, :] > most[:, None]).to(tl.int32), 1)
    return tl.max(tl.where(above >= K, most, tl.min(most, 0)), 0)


@triton.jit
def _route_kernel(
    logits, stride, bias, scores, index, weight, cutoff, counts, scratch, experts, floor, scaling, K: tl.constexpr,
    BE: tl.constexpr, LIMIT: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    logits += token * stride
    scratch += token * LIMIT
    at = tl.arange(0, BE)
    inside = at < experts
    score = sigmoid(tl.load(logits + at, inside, 0.0))
    tl.store(scores + token * experts + at, score, inside)
    biased = score + tl.load(bias + at, inside, 0.0)
    key = tl.where(inside, _ordered(biased.to(tl.int32, bitcast=True)), _LOWEST)
    reached = inside
    if BE > LIMIT:  # then at least 4 GROUPS
        reached = inside & (key >= _bound(key, K, BE))
    found = tl.sum(reached.to(tl.int32), 0)
    if found <= LIMIT:
        tl.store(scratch + tl.cumsum(reached.to(tl.int32), 0) - 1, _numbered(key, at), reached)
    else:
        largest = tl.zeros([], tl.int64) + _ANYTHING
        for place in range(K + 1):  # made anew in each round: these numbers take twice the registers of the keys
            numbered = _numbered(key, at)
            largest = tl.max(tl.where(inside & (numbered < largest), numbered, _NOTHING), 0)
            tl.store(scratch + place, largest)
        found = tl.minimum(found, K + 1)
    tl.debug_barrier()
    slot = tl.arange(0, LIMIT)
    candidate = tl.load(scratch + slot, slot < found, _NOTHING)
    rank = tl.sum((candidate[None, :] > candidate[:, None]).to(tl.int32), 1)
    expert = 0x7FFFFFFF - (candidate & 0x7FFFFFFF).to(tl.int32)
    chosen = (rank < K) & (slot < found)
    value = sigmoid(tl.load(logits + expert, chosen, 0.0))
    if RENORMALIZE:
        value = value / (tl.sum(tl.where(chosen, value, 0.0), 0) + floor)
    tl.store(index + token * K + rank, expert.to(tl.int64), chosen)
    tl.store(weight + token * K + rank, value * scaling, chosen)
    last = (rank == K) & (slot < found)
    tl.store(
        cutoff + token + tl.zeros_like(rank),
        _ordered((candidate >> 32).to(tl.int32)).to(tl.float32, bitcast=True),
        last,
    )
    tl.atomic_add(counts + expert, tl.full([LIMIT], 1, tl.int64), chosen, sem="relaxed")


@triton.jit
def _backward_kernel(
    dweight, index, scores, dlogits, experts, floor, scaling, K: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at, slot = tl.arange(0, BE), tl.arange(0, BK)
    tl.store(dlogits + token * experts + at, tl.zeros([BE], tl.float32), at < experts)
    expert = tl.load(index + token * K + slot, slot < K, 0)
    value = tl.load(scores + token * experts + expert, slot < K, 0.0)
    d = tl.load(dweight + token * K + slot, slot < K, 0.0) * scaling
    if RENORMALIZE:
        total = tl.sum(value, 0) + floor
        d = (d - tl.sum(d * value, 0) / total) / total
    tl.debug_barrier()  # the zeros come first
    tl.store(dlogits + token * experts + expert, d * value * (1.0 - value), slot < K)


def obstacle(logits_NE: Tensor, k: int) -> str | None:
    """Why the kernel cannot route these logits; None if it can."""
    if logits_NE.dtype != torch.float32:
        return f"the router's kernel takes float32, not {str(logits_NE.dtype).removeprefix('torch.')}"
    if k > LARGEST_K:
        return f"the router's kernel takes up to {LARGEST_K} active experts, not {k}"
    return None


def route(
    logits_NE: Tensor, bias_E: Tensor, k: int, renormalize: bool, scaling_factor: float, floor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (index_NA int64, weight_NA, scores_NE, cutoff_N, counts_E int64); fp32."""
    tokens, experts = logits_NE.shape
    device = logits_NE.device
    logits_NE = logits_NE if logits_NE.stride(-1) == 1 else logits_NE.contiguous()
    scores_NE = torch.empty(tokens, experts, device=device)
    index_NA, weight_NA = (
        torch.empty(tokens, k, dtype=torch.int64, device=device),
        torch.empty(tokens, k, device=device),
    )
    cutoff_N, counts_E = torch.empty(tokens, device=device), torch.zeros(experts, dtype=torch.int64, device=device)
    keys = max(32, power_of_two(experts))
    limit = SMALL if keys <= SMALL else LIMIT
    scratch_NC = torch.empty(tokens, limit, dtype=torch.int64, device=device)
    if tokens:
        _route_kernel[(tokens,)](
            logits_NE, logits_NE.stride(0), bias_E.contiguous(), scores_NE, index_NA, weight_NA, cutoff_N, counts_E,
            scratch_NC, experts, floor, scaling_factor, K=k, BE=keys, LIMIT=limit, RENORMALIZE=renormalize,
            num_warps=max(1, keys // WARP),
        )  # fmt: skip
    return index_NA, weight_NA, scores_NE, cutoff_N, counts_E


def route_backward(
    scores_NE: Tensor, index_NA: Tensor, dweight_NA: Tensor, renormalize: bool, scaling_factor: float, floor: float
) -> Tensor:
    """Return dlogits_NE given the gradient of the weights; fp32."""
    tokens, experts = scores_NE.shape
    k = index_NA.shape[1]
    dlogits_NE = torch.empty_like(scores_NE)
    if tokens:
        _backward_kernel[(tokens,)](
            dweight_NA.contiguous(), index_NA, scores_NE, dlogits_NE, experts, floor, scaling_factor, K=k,
            BK=power_of_two(k), BE=power_of_two(experts), RENORMALIZE=renormalize, num_warps=2,
        )  # fmt: skip
    return dlogits_NE
