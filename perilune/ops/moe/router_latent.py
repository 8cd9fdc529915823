"""What a mixture of experts makes of its tokens first: the experts' input and the router's logits.

    z = x W_down^T          [N, L] in the tokens' dtype
    logits = x W_router^T   [N, E] in float32, whatever the tokens are: a rounded score sends tokens elsewhere

On a CUDA device both are one product of bfloat16 tokens, whose logits are still exact to float32. Its backward pass keeps
the precision where it is kept: dx is rounded to bfloat16 in the end, so its products are of bfloat16 numbers; the router
weight's gradient takes the logits' gradient in two parts, 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from perilune.ops.choice import Choice
from perilune.ops.linear import linear
from perilune.ops.narrow import in_dtype
from perilune.ops.triton.available import DTYPES
from perilune.ops.triton.available import choose as choose_triton

LEAST_TOKENS = 512


def select(x_ND: Tensor, down_weight_LD: Tensor, router_weight_ED: Tensor) -> Choice:
    """Say whether `project` is one kernel ("triton") or two products of torch, and why."""
    choice = choose_triton(x_ND)
    if choice is None:
        return Choice("torch", "two products: one kernel for both exists on CUDA devices")
    if choice.implementation != "triton":
        return choice
    if len(x_ND) < LEAST_TOKENS:
        return Choice("torch", f"two products: fewer than {LEAST_TOKENS} tokens leave most of a GPU's tiles empty")
    if x_ND.dtype != torch.bfloat16:
        return Choice("torch", f"two products: the kernel takes bfloat16 tokens, not {str(x_ND.dtype)[6:]}")
    if any(size % 8 for size in (x_ND.shape[1], len(down_weight_LD))):
        return Choice("torch", "two products: the copy engine needs widths that are multiples of 8")
    if any(type(weight) not in (Tensor, Parameter) for weight in (down_weight_LD, router_weight_ED)):
        return Choice("torch", "two products: the kernel needs plain weights")
    if router_weight_ED.dtype not in DTYPES:
        return Choice("torch", f"two products: the kernel takes no router weights in {str(router_weight_ED.dtype)[6:]}")
    if x_ND.is_cuda and torch.cuda.get_device_capability(x_ND.device) < (9, 0):
        return Choice("torch", "two products: the kernel's copy engine begins with compute capability 9.0")
    return Choice("triton", "one product, the router's weights in three bfloat16 parts")


def project(x_ND: Tensor, down_weight_LD: Tensor, router_weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    """Latents and logits of tokens.

    Args:
        x_ND: tokens.
        down_weight_LD: of the projection into the experts' latent space, in any dtype.
        router_weight_ED: of the router; float32 keeps all its bits.

    Returns:
        z `[N, L]` in the tokens' dtype; logits `[N, E]`, before the sigmoid, in float32 (float64 for float64 tokens).
    """
    if select(x_ND, down_weight_LD, router_weight_ED).implementation == "triton":
        return _Project.apply(x_ND, down_weight_LD, router_weight_ED)
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    return linear(x_ND, down_weight_LD), linear(x_ND.to(wide), router_weight_ED)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, down_weight_LD, router_weight_ED):
        from perilune.ops.moe.triton.router_latent import project

        x_ND = x_ND.contiguous()
        ctx.save_for_backward(x_ND, down_weight_LD, router_weight_ED)
        ctx.set_materialize_grads(False)
        return project(x_ND, down_weight_LD, router_weight_ED)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dz_NL, dlogits_NE):
        x_ND, down_weight_LD, router_weight_ED = ctx.saved_tensors
        wants_x, wants_down, wants_router = ctx.needs_input_grad
        dx = ddown = drouter = None
        if dz_NL is not None:
            if wants_x:
                dx = dz_NL @ in_dtype(down_weight_LD, dz_NL.dtype)
            if wants_down:
                ddown = _product(dz_NL.t(), x_ND).to(down_weight_LD.dtype)
        if dlogits_NE is not None:
            high = dlogits_NE.to(x_ND.dtype)
            if wants_x:
                weight_ED = router_weight_ED.to(x_ND.dtype)
                dx = high @ weight_ED if dx is None else dx.addmm_(high, weight_ED)
            if wants_router:
                low = (dlogits_NE - high).to(x_ND.dtype)
                drouter = _product(high.t(), x_ND) + _product(low.t(), x_ND)
        return dx, ddown, drouter


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bfloat16 matrices in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
