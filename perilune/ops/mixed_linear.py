"""y = x Wᵀ for training on a GPU, with x in half precision and the weight in float32.

    dx = dy W in x's dtype;   dW = dyᵀ x, summed and left in float32

Left to autograd, dW would be rounded to half precision and then widened in a pass of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter


def takes(x: Tensor, weight_OI: Tensor) -> bool:
    """Whether `mixed_linear` is for this call: gradients, a CUDA device, half precision and a plain float32 weight."""
    return (
        x.is_cuda
        and x.dtype.itemsize == 2
        and weight_OI.dtype is torch.float32
        and torch.is_grad_enabled()
        and (x.requires_grad or weight_OI.requires_grad)
        and type(weight_OI) in (Tensor, Parameter)
        and not torch.compiler.is_compiling()
    )


def mixed_linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """Map `[..., I]` to `[..., O]` in x's dtype; differentiable."""
    return _MixedLinear.apply(x, weight_OI)


class _MixedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_OI):
        narrow_OI = weight_OI.to(x.dtype)
        ctx.save_for_backward(x, narrow_OI)
        return F.linear(x, narrow_OI)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, narrow_OI = ctx.saved_tensors
        dx = dweight_OI = None
        if ctx.needs_input_grad[0]:
            dx = dy @ narrow_OI
        if ctx.needs_input_grad[1]:
            dy_NO, x_NI = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
            dweight_OI = product(dy_NO.t(), x_NI)
        return dx, dweight_OI


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of half-precision matrices in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
