"""y = x Wᵀ with an fp32 weight, in the dtype of x: the product of every projection; `linears` for several of one x.

`normed_linear` and `gated_linear` have an RMSNorm or a gate before the product. Five ways, of which `select` tells those
without gradients:

    native  a few rows without gradients (decoding): one C call that reads each weight once, for all weights of an x
    cuda    a few bf16 rows on Hopper, without gradients: one launch for all weights of an x, norm and gate included
    wide    bf16 rows on a CPU that cannot multiply bf16: the product runs in fp32, its result is rounded
    mixed   training in half precision on a GPU: gradients of the weights stay in fp32 (`mixed_linear`)
    torch   everything else
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from struct import pack

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.ops.choice import Choice, forced
from perilune.ops.few_rows import kernels as few_rows
from perilune.ops.few_rows.cuda.project import MOST_MATRICES, project
from perilune.ops.mixed_linear import mixed_linears, takes
from perilune.ops.native import rows
from perilune.ops.native.blas import multiplies_bf16
from perilune.ops.norm import rms_norm

FEW_ROWS = 8
MAX_WEIGHTS = 8

_CUDA = Choice("cuda", "one launch for all matrices of a few rows, bound by reading them")


def select(x: Tensor, weight_OI: Tensor) -> Choice:
    """Return which way `linear` takes for these operands, and why."""
    if _on_hopper(x):
        reason = few_rows.why_not(x, weight_OI)
        return _CUDA if reason is None else Choice("torch", reason)
    if x.dtype is torch.float32 and x.numel() <= FEW_ROWS * x.shape[-1]:
        if not torch.is_grad_enabled() and weight_OI.dtype is torch.float32 and weight_OI.is_contiguous():
            return rows.choose("linear", x)
    elif x.dtype is torch.bfloat16 and x.is_cpu and not multiplies_bf16():
        return Choice("torch", "fp32 product, rounded to bf16: this CPU does not multiply bf16")
    if (wanted := forced()) in ("torch", "reference"):
        return Choice("torch", f"asked for {wanted}")
    return Choice("torch", "more rows than a matrix-vector kernel serves, gradients, or another dtype")


def linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """Map `[..., I]` to `[..., O]`; the weight may be in another dtype than x, the result is in that of x."""
    if _few_on_hopper(x, weight_OI):
        return project(x, [weight_OI])[0].view(*x.shape[:-1], -1)
    # Decoding calls this many times a token and layer: what cannot be native is told from one look at the sizes.
    if x.numel() <= FEW_ROWS * x.shape[-1] and select(x, weight_OI).implementation == "native":
        return _one_weight(x, weight_OI)
    if x.dtype is torch.bfloat16 and x.is_cpu and not multiplies_bf16():
        return F.linear(x.float(), weight_OI.float()).to(x.dtype)
    if takes(x, weight_OI):
        return mixed_linears(x, weight_OI)[0]
    return F.linear(x, weight_OI.to(x.dtype))


def linears(x: Tensor, *weights_OI: Tensor) -> tuple[Tensor, ...]:
    """Map `[..., I]` by each weight `[O_i, I]`: the projections that read one x; see `linear`.

    The results may be slices of one tensor.
    """
    if len(weights_OI) <= MOST_MATRICES and _few_on_hopper(x, *weights_OI):
        return tuple(y.unflatten(0, x.shape[:-1]) for y in project(x, weights_OI))
    first, *others = weights_OI
    few = len(weights_OI) <= MAX_WEIGHTS and x.numel() <= FEW_ROWS * x.shape[-1]
    if few and select(x, first).implementation == "native":
        if all(weight.dtype is torch.float32 and weight.is_contiguous() for weight in others):
            return _many_weights(x, weights_OI)
    if all(takes(x, weight) for weight in weights_OI):
        return mixed_linears(x, *weights_OI)
    return tuple(linear(x, weight) for weight in weights_OI)


def normed_linear(x: Tensor, norm_weight_I: Tensor, eps: float, weight_OI: Tensor) -> Tensor:
    """`linear` of the RMSNorm of x over its last dimension."""
    if _few_on_hopper(x, weight_OI) and norm_weight_I.dtype is torch.float32:
        return project(x, [weight_OI], norm=(norm_weight_I, eps))[0].view(*x.shape[:-1], -1)
    return linear(rms_norm(x, norm_weight_I, eps), weight_OI)


def gated_linear(x: Tensor, gate: Tensor, weight_OI: Tensor) -> Tensor:
    """`linear` of x · sigmoid(gate), `[..., I]` both."""
    if _few_on_hopper(x, weight_OI):
        return project(x, [weight_OI], gate_NK=gate)[0].view(*x.shape[:-1], -1)
    return linear(x * torch.sigmoid(gate), weight_OI)


def _on_hopper(x: Tensor) -> bool:
    """Whether the kernels of few rows are of any concern: a CUDA tensor, or what stands in for one in tests."""
    return forced() == "cuda" or x.is_cuda and forced() is None


def _few_on_hopper(x: Tensor, *weights_OI: Tensor) -> bool:
    return x.dtype is torch.bfloat16 and _on_hopper(x) and few_rows.why_not(x, *weights_OI) is None


def _one_weight(x: Tensor, weight_OI: Tensor) -> Tensor:
    x = x.contiguous()
    out, width = weight_OI.shape
    y = x.new_empty((*x.shape[:-1], out))
    threads = rows.threads_for(2 * out * width)
    _one()(x.data_ptr(), weight_OI.data_ptr(), y.data_ptr(), out, x.numel() // width, width, threads)
    return y


def _many_weights(x: Tensor, weights_OI: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x = x.contiguous()
    width, count = x.shape[-1], len(weights_OI)
    sizes = [weight.shape[0] for weight in weights_OI]
    total = sum(sizes)
    y = x.new_empty((*x.shape[:-1], total))
    _many()(
        x.data_ptr(), pack(f"{count}Q", *[weight.data_ptr() for weight in weights_OI]), y.data_ptr(),
        pack(f"{count}q", *sizes), count, x.numel() // width, width, rows.threads_for(2 * total * width),
    )  # fmt: skip
    return torch.split_with_sizes(y, sizes, -1)


@lru_cache
def _one() -> Callable[..., None]:
    return rows.entry("linear", "pl_one_weight", torch.float32, "pppllll")


@lru_cache
def _many() -> Callable[..., None]:
    return rows.entry("linear", "pl_many_weights", torch.float32, "ppppllll")
