"""Products of a few tokens with a matrix of each head, out[n, h] = x[n, h] w[h], in one launch and in the tokens' own order.

The up-projections around absorbed attention are such products. As batched products of a library they come with copies that
bring the heads outside and back, and the four to six small launches took 21 of 312 us of a step of 16 sequences on an H200.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.triton.products import product
from perilune.ops.triton.sizes import blocks, power_of_two

DEPTH = 128  # of a step
NUMBERS = 16384  # of a tile of a matrix


@triton.jit(do_not_specialize=["tokens"])
def _project_kernel(
    x, w, out, tokens, x_n, x_h, w_h, w_k, w_o, K: tl.constexpr, O: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    token, column = tl.program_id(2) * BN + tl.arange(0, BN), tl.program_id(0) * BO + tl.arange(0, BO)
    there, inside = (token < tokens)[:, None], (column < O)[None, :]
    x += head * x_h + token[:, None].to(tl.int64) * x_n
    w += head * w_h + column[None, :] * w_o
    total = tl.zeros([BN, BO], tl.float32)
    for start in range(0, K, BK):
        at = start + tl.arange(0, BK)
        left = tl.load(x + at[None, :], there & (at < K)[None, :], 0.0)
        right = tl.load(w + at[:, None] * w_k, inside & (at < K)[:, None], 0.0)
        total = product(left, right, total)
    place = (token[:, None].to(tl.int64) * heads + head) * O + column[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), there & inside)


def project(x_NHK: Tensor, w_HKO: Tensor) -> Tensor:
    """The products.

    Args:
        x_NHK: `[N, H, K]` tokens, dense last axis.
        w_HKO: `[H, K, O]` matrices, any strides, in the tokens' dtype.

    Returns:
        `[N, H, O]`, dense, in the tokens' dtype; summed in fp32.
    """
    tokens, heads, depth = x_NHK.shape
    columns = w_HKO.shape[2]
    out = torch.empty(tokens, heads, columns, dtype=x_NHK.dtype, device=x_NHK.device)
    tile = min(64, max(16, power_of_two(tokens)))
    step = min(DEPTH, max(16, power_of_two(depth)))
    width = min(max(16, power_of_two(columns)), NUMBERS // step if depth <= DEPTH else NUMBERS // (4 * step))
    _project_kernel[(blocks(columns, width), heads, blocks(tokens, tile))](
        x_NHK, w_HKO, out, tokens, *x_NHK.stride()[:2], *w_HKO.stride(), K=depth, O=columns, BK=step, BO=width, BN=tile,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
