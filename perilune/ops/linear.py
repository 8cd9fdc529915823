"""y = x Wᵀ with an fp32 weight, in the dtype of x: the product of every projection.

Three ways, chosen by `select`:

    native  a few rows without gradients (decoding): one C call that reads each weight once
    wide    bf16 rows on a CPU that cannot multiply bf16: the product runs in fp32, its result is rounded
    torch   everything else
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.ops.choice import Choice, forced
from perilune.ops.native import rows
from perilune.ops.native.blas import multiplies_bf16

FEW_ROWS = 8


def select(x: Tensor, weight_OI: Tensor) -> Choice:
    """Return which way `linear` takes for these operands, and why."""
    if x.dtype == torch.bfloat16 and x.is_cpu and not multiplies_bf16():
        return Choice("torch", "fp32 product, rounded to bf16: this CPU does not multiply bf16")
    if (wanted := forced()) in ("torch", "reference"):
        return Choice("torch", f"asked for {wanted}")
    few = x.dtype == torch.float32 and x.numel() <= FEW_ROWS * x.shape[-1]
    if few and not torch.is_grad_enabled() and weight_OI.dtype == torch.float32 and weight_OI.is_contiguous():
        return rows.choose("linear", x)
    return Choice("torch", "more rows than a matrix-vector kernel serves, gradients, or another dtype")


def linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """Map `[..., I]` to `[..., O]`; the weight may be in another dtype than x, the result is in that of x."""
    # Decoding calls this about ten times a token and layer: what cannot be native is told from one look at the sizes.
    if x.numel() <= FEW_ROWS * x.shape[-1] and select(x, weight_OI).implementation == "native":
        return _few_rows(x, weight_OI)
    if x.dtype is torch.bfloat16 and x.is_cpu and not multiplies_bf16():
        return F.linear(x.float(), weight_OI.float()).to(x.dtype)
    return F.linear(x, weight_OI.to(x.dtype))


def _few_rows(x: Tensor, weight_OI: Tensor) -> Tensor:
    x = x.contiguous()
    out, width = weight_OI.shape
    y = x.new_empty((*x.shape[:-1], out))
    threads = rows.threads_for(2 * out * width)
    _kernel()(x.data_ptr(), weight_OI.data_ptr(), y.data_ptr(), x.numel() // width, out, width, threads)
    return y


@lru_cache
def _kernel() -> Callable[..., None]:
    return rows.entry("linear", "pl_few_rows", torch.float32, "pppllll")
