"""y_i = x W_iᵀ for training on a GPU, with x in half precision and the weights in float32.

    dx = Σ dy_i W_i, each product added to the last in its own kernel;   dW_i = dy_iᵀ x, summed and left in float32

Left to autograd, dW would be rounded to half precision and then widened in a pass of its own, and the sum over several
projections of one x would be a pass for each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from perilune.ops.choice import forced
from perilune.ops.narrow import in_dtype


def takes(x: Tensor, weight_OI: Tensor) -> bool:
    """Whether `mixed_linears` is for this call: gradients, a CUDA device, half precision and a plain float32 weight."""
    return (
        x.is_cuda
        and x.dtype.itemsize == 2
        and weight_OI.dtype is torch.float32
        and torch.is_grad_enabled()
        and (x.requires_grad or weight_OI.requires_grad)
        and type(weight_OI) in (Tensor, Parameter)
        and forced() not in ("torch", "reference")
        and not torch.compiler.is_compiling()
    )


def mixed_linears(x: Tensor, *weights_OI: Tensor) -> tuple[Tensor, ...]:
    """Map `[..., I]` by each weight `[O_i, I]`, in x's dtype; differentiable."""
    return _MixedLinears.apply(x, *weights_OI)


class _MixedLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *weights_OI):
        narrow = [in_dtype(weight_OI, x.dtype) for weight_OI in weights_OI]
        ctx.save_for_backward(x, *narrow)
        ctx.set_materialize_grads(False)
        return tuple(F.linear(x, weight_OI) for weight_OI in narrow)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        x, *narrow = ctx.saved_tensors
        x_NI = x.reshape(-1, x.shape[-1])
        dx_NI, dweights = None, []
        for dy, weight_OI, wanted in zip(dys, narrow, ctx.needs_input_grad[1:], strict=True):
            if dy is None:
                dweights.append(None)
                continue
            dy_NO = dy.reshape(-1, dy.shape[-1])
            if ctx.needs_input_grad[0]:
                dx_NI = dy_NO @ weight_OI if dx_NI is None else dx_NI.addmm_(dy_NO, weight_OI)
            dweights.append(product(dy_NO.t(), x_NI) if wanted else None)
        return None if dx_NI is None else dx_NI.view(x.shape), *dweights


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of half-precision matrices in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
