"""A model's large matrices in the type that it computes in, for serving: what is multiplied is then read as it lies.

Training keeps every parameter in fp32 and rounds matrices on their way into a product. Served weights do not change, so
they are rounded once; the numbers that come out are the same.
"""

from __future__ import annotations

import torch
from torch import nn

from perilune.model.latent_moe import Experts
from perilune.model.linear import Linear
from perilune.model.transformer import Transformer

MATRICES = (Linear, nn.Embedding, Experts)


def compute_in(model: Transformer, dtype: torch.dtype) -> Transformer:
    """Let a model compute in `dtype`, and round the matrices that only meet numbers of that type.

    Routers, convolutions, norms, queries over depth and the decay's parameters stay in fp32: they are read in fp32.

    Args:
        model: changed in place; its gradients are dropped. Not for training: see `Transformer.compute_dtype`.
        dtype: bfloat16, float16, or a wider one, for which nothing is rounded.

    Returns:
        The model.
    """
    model.compute_dtype = dtype
    if dtype.itemsize < torch.float32.itemsize:
        for module in model.modules():
            if isinstance(module, MATRICES):
                for parameter in module.parameters(recurse=False):
                    parameter.requires_grad_(False)
                    parameter.data = parameter.data.to(dtype)
    return model
