"""Newton-Schulz orthogonalisation of many matrices at once: the heart of Muon (training, §2.3).

    X = M / ||M||_F;   5 times:  A = X X^T,  X = a X + (b A + c A^2) X

drives the singular values of M to about 1 (0.7 to 1.2 with these coefficients) and keeps its singular vectors, with
matrix products only. A tall matrix is transposed first, so that A has the smaller side.

All factors are polynomials of the first A and commute. On a GPU much longer matrices take this form, in which only the first
and the last product have the long side (A in fp32: what is small in it counts, as the steps make it large):

    A = X X^T;   5 times:  P = a + b A + c A^2,  Q = P Q,  A = P^2 A;   X = Q X

Other bfloat16 matrices on a GPU multiply X by a I + b A + c A^2, whose two symmetric products a kernel makes by half
their tiles (`ops.triton.newton_schulz`).
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from perilune.ops.choice import Choice, forced
from perilune.ops.native.blas import sgemm_address, why_no_blas, why_not_plain
from perilune.ops.native.build import load, unavailable_reason
from perilune.ops.triton.available import choose as choose_triton

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NORM_FLOOR = 1e-7  # a zero matrix (no gradient, or a shard of padding) stays zero instead of becoming 0/0
GRAM_RATIO = 32  # long side over short from which the form on Gram matrices is faster on a GPU: its products are fp32
BATCHED_SIDE = 512  # from this smaller side on, one product keeps all cores busy and there is nothing to gain


def select(x_MN: Tensor, dtype: torch.dtype) -> Choice:
    """Return which implementation iterates on these matrices with products in `dtype`, and why."""
    if (wanted := forced()) in ("torch", "reference"):
        return Choice("torch", f"asked for {wanted}")
    if dtype is torch.bfloat16 and (choice := choose_triton(x_MN)) is not None:
        if choice.implementation == "triton":
            return Choice(
                "triton", "symmetric products by half their tiles, where rows are whole 16-byte units; else torch"
            )
        return choice
    if dtype is not torch.float32:
        return Choice("torch", f"the C kernel multiplies in float32, asked for {str(dtype)[6:]}")
    if min(x_MN.shape[-2:]) >= BATCHED_SIDE:
        return Choice("torch", f"matrices with both sides from {BATCHED_SIDE} on fill the cores one by one")
    reason = why_not_plain(x_MN) or unavailable_reason("newton_schulz") or why_no_blas()
    return (
        Choice("torch", reason) if reason else Choice("native", "each matrix stays in one core's cache for all steps")
    )


@torch.no_grad()
def newton_schulz(
    x_MN: Tensor,
    steps: int = 5,
    dtype: torch.dtype | None = None,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
) -> Tensor:
    """Orthogonalise each matrix.

    Args:
        x_MN: `[..., M, N]`; leading dimensions are a batch (heads, experts). Matrices are independent of each other.
        steps: iterations.
        dtype: dtype of the products; None = the input's, but at least fp32. bf16 is enough for Muon and faster where
            the hardware multiplies it.
        coefficients: (a, b, c) above.

    Returns:
        `[..., M, N]` in the input's dtype.
    """
    wide = torch.promote_types(x_MN.dtype, torch.float32)
    tall = x_MN.shape[-2] > x_MN.shape[-1]
    x = (x_MN.mT if tall else x_MN).to(wide)
    # The norm in full precision, and before the cast: bf16 sums of squares would lose small matrices.
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(NORM_FLOOR)).to(dtype or wide)
    lead = x.shape[:-2]
    x = x.reshape(-1, *x.shape[-2:])
    if select(x, x.dtype).implementation == "native":
        x = _native(x.contiguous(), steps, coefficients)
    else:
        x = iterate(x, steps, coefficients)
    x = x.view(*lead, *x.shape[-2:]).to(x_MN.dtype)
    return x.mT if tall else x


def iterate(x_BMN: Tensor, steps: int = 5, coefficients: tuple[float, float, float] = COEFFICIENTS) -> Tensor:
    """All steps on matrices of norm 1 at most, by products in their dtype; tall ones are multiplied from the right."""
    a, b, c = coefficients
    tall = x_BMN.shape[1] > x_BMN.shape[2]
    short, long = sorted(x_BMN.shape[1:])
    if steps and x_BMN.is_cuda and long >= GRAM_RATIO * short:
        return gram_form(x_BMN.mT, steps, coefficients).mT if tall else gram_form(x_BMN, steps, coefficients)
    x = x_BMN
    if _symmetric(x):
        from perilune.ops.triton.newton_schulz import symmetric

        x = x.contiguous()
        for _ in range(steps):
            gram = symmetric(x)
            factor = symmetric(gram, gram, identity=a, of_added=b, of_products=c)
            x = torch.bmm(x, factor) if tall else torch.bmm(factor, x)
        return x
    for _ in range(steps):
        gram = torch.bmm(x.mT, x) if tall else torch.bmm(x, x.mT)
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, factor, beta=a) if tall else torch.baddbmm(x, factor, x, beta=a)
    return x


def _symmetric(x_BMN: Tensor) -> bool:
    """Whether a kernel makes the two symmetric products of a step: bfloat16 on a GPU, or where Triton is demanded."""
    if x_BMN.dtype is not torch.bfloat16 and forced() != "triton":
        return False
    choice = choose_triton(x_BMN)
    if choice is None or choice.implementation != "triton":
        return False
    from perilune.ops.triton.newton_schulz import obstacle

    return obstacle(x_BMN) is None


def gram_form(x_BMN: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """All steps, at least one, on matrices M <= N of norm 1 at most, by polynomials of their Gram matrices in fp32 (fp64)."""
    a, b, c = coefficients
    if x_BMN.is_cuda and x_BMN.dtype.itemsize == 2:
        gram = torch.bmm(x_BMN, x_BMN.mT, out_dtype=torch.float32)
    else:
        wide = x_BMN.to(torch.promote_types(x_BMN.dtype, torch.float32))
        gram = torch.bmm(wide, wide.mT)
    eye = a * torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    product = None
    for step in range(steps):
        factor = torch.baddbmm(torch.add(eye, gram, alpha=b), gram, gram, alpha=c)
        product = factor if product is None else torch.bmm(factor, product)
        if step < steps - 1:
            gram = torch.bmm(factor, torch.bmm(factor, gram))
    assert product is not None, "no steps"
    return torch.bmm(product.to(x_BMN.dtype), x_BMN)


def _native(x_BMN: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """Iterate in place on `x_BMN`, which the caller owns."""
    library = load("newton_schulz")
    assert library is not None, "the C kernel was chosen but is not available"
    function = library.newton_schulz
    function.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int, c_float, c_float, c_float, c_int)
    if function(sgemm_address(), x_BMN.data_ptr(), *x_BMN.shape, steps, *coefficients, torch.get_num_threads()):
        raise MemoryError("no memory for the Newton-Schulz working space")
    return x_BMN
