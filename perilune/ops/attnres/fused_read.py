"""A read over depth in one launch on a CUDA device, with gradients: by the CUDA kernels or by Triton's.

The CUDA kernels sum the mix again in their backward pass; Triton's keep it where a norm follows. Of two sources Triton's
forward kernel, a program a token, is the faster one: its many programs hide what a token waits for between its steps. Of a few
tokens the CUDA kernels are: they may begin while the kernel ahead of them still runs, and one of them does without a ring of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.attnres.cuda import read as cuda
from perilune.ops.attnres.slots import GradientSlots
from perilune.ops.few_rows.cuda.read import read as read_few
from perilune.ops.few_rows.kernels import MOST_ROWS
from perilune.ops.triton.available import missing

FEW_SOURCES = 2
FEW_ROWS = 132  # tokens, a block each
FEW_WIDTH = 2048  # numbers of a row of which all sources fit the registers of a block


def read(
    implementation: str, sources: Sequence[Tensor], delta: Tensor | None, score_weight_D: Tensor, eps: float,
    norm_weight_D: Tensor | None = None, norm_eps: float = 0.0, given: Tensor | None = None,
    slot: tuple[GradientSlots, int] | None = None, query_D: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mix the sources, the last of them being the running sum; arguments and results as `attnres.read`.

    implementation: "cuda" or "triton".
    given: float32 scores [...] of the first source, which is then a sum over a bank.
    slot: where the gradient of that source should be written; None = anywhere.
    """
    on_cuda = implementation == "cuda"
    inputs = [*sources, delta, given, score_weight_D, query_D, norm_weight_D]
    gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    few = on_cuda and not gradients and sources[0].numel() <= FEW_ROWS * sources[0].shape[-1]
    if query_D is not None and not few:
        score_weight_D, query_D = score_weight_D * query_D, None
    if few and given is None and sources[0].numel() <= MOST_ROWS * sources[0].shape[-1] <= MOST_ROWS * FEW_WIDTH:
        weights = [None if w is None else cuda.floats(w) for w in (score_weight_D, norm_weight_D, query_D)]
        total, out = read_few(sources, delta, weights[0], eps, weights[1], norm_eps, weights[2])
    elif few:
        total, out, _ = cuda.forward(
            sources, delta, score_weight_D, eps, norm_weight_D, norm_eps, given=_dense(given), query_D=query_D
        )
    elif gradients:
        total, out = _Read.apply(on_cuda, score_weight_D, norm_weight_D, delta, given, eps, norm_eps, slot, *sources)
    else:
        total, out, *_ = _forward(
            on_cuda, sources, delta, score_weight_D, eps, norm_weight_D, norm_eps, training=False, given=_dense(given)
        )
    return out, sources[-1] if total is None else total


def _forward(
    on_cuda: bool, sources: Sequence[Tensor], delta: Tensor | None, *rest: Any, **more: Any
) -> tuple[Any, ...]:
    """Running sum or None, output, and for training what the backward kernel wants."""
    if on_cuda and (len(sources) > FEW_SOURCES or missing() is not None or not sources[0].is_cuda):
        return cuda.forward(sources, delta, *rest, **more)
    from perilune.ops.attnres.triton_mix import forward

    if not on_cuda:
        return forward(sources, delta, *rest, **more)
    total, out, _, statistics = forward(sources, delta, *rest, keep_mix=False, **more)
    return total, out, statistics


def _dense(given: Tensor | None) -> Tensor | None:
    return None if given is None else given.contiguous()


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, on_cuda, score_weight_D, norm_weight_D, delta, given, eps, norm_eps, slot, *sources):
        total, out, *kept = _forward(
            on_cuda, sources, delta, score_weight_D, eps, norm_weight_D, norm_eps, training=True, given=_dense(given)
        )
        live = sources[-1] if total is None else total
        ctx.save_for_backward(score_weight_D, norm_weight_D, *kept, *sources[:-1], live)
        ctx.on_cuda, ctx.kept, ctx.norm_eps, ctx.slot = on_cuda, len(kept), norm_eps, slot
        ctx.added, ctx.given_shape = total is not None, None if given is None else given.shape
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal, dout):
        score_weight_D, norm_weight_D, *saved = ctx.saved_tensors
        kept, sources = saved[: ctx.kept], saved[ctx.kept :]
        given = ctx.given_shape is not None
        if dout is None:
            dlive = dtotal
            return None, None, None, dlive if ctx.added else None, *[None] * (3 + len(sources)), dlive
        if ctx.on_cuda:
            backward = cuda.backward
        else:
            from perilune.ops.attnres.triton_mix import backward
        found = backward(
            sources, dout, dtotal, *kept, score_weight_D, norm_weight_D, ctx.norm_eps,
            given=given, into=None if ctx.slot is None else ctx.slot[0][ctx.slot[1]],
        )  # fmt: skip
        dscore_D, dnorm_D, dgiven, gradients = found
        wanted = ctx.needs_input_grad
        dsources = [gradient if want else None for gradient, want in zip(gradients, wanted[8:], strict=True)]
        return (
            None, dscore_D if wanted[1] else None, dnorm_D if wanted[2] else None, gradients[-1] if ctx.added else None,
            dgiven.view(ctx.given_shape) if given and wanted[4] else None, None, None, None, *dsources,
        )  # fmt: skip
