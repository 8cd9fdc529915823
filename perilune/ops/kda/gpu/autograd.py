"""The KDA kernels as one differentiable function: what is kept between the passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.kda.arguments import Arguments
from perilune.ops.kda.gpu.backward import backward
from perilune.ops.kda.gpu.forward import Forward, Prepared, Setting, flat, forward


def kda_gpu(args: Arguments) -> tuple[Tensor, Tensor | None]:
    """Run the kernels. Returns `(o [B, T, HV, V] in q's dtype, final state in the caller's layout or None)`."""
    A_log, dt_bias = (None if t is None else t.contiguous() for t in (args.A_log, args.dt_bias))
    inputs = (args.q, args.k, args.v, args.g, args.beta, A_log, dt_bias, args.initial_state)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    setting = Setting.of(args, keep)
    if keep:
        return _Function.apply(*inputs, setting)
    found = _forward(*inputs, setting)
    return found.o.view(args.v.shape), found.final


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    state: Tensor | None, s: Setting,
) -> Forward:  # fmt: skip
    with torch.cuda.device_of(q):
        return forward(flat(q), flat(k), flat(v), flat(g), flat(beta), A_log, dt_bias, state, s)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None,
        dt_bias: Tensor | None, state: Tensor | None, s: Setting,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        f = _forward(q, k, v, g, beta, A_log, dt_bias, state, s)
        ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, *f.x, f.U, f.S, f.M)
        ctx.has_state, ctx.plan, ctx.setting = state is not None, f.plan, s
        return f.o.view(v.shape), f.final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, A_log, dt_bias, *prepared, U, S, M = ctx.saved_tensors
        s: Setting = ctx.setting
        x = Prepared(*prepared)
        grads = backward(
            *(flat(t) for t in (q, k, v, g, beta, do)), A_log, dt_bias, d_final, x, U, S, M, ctx.plan, s, ctx.has_state
        )
        dq, dk, dv, dg, dbeta, dA_log, d_bias, d_state = grads
        return (
            dq.view(q.shape),
            dk.view(k.shape),
            dv.view(do.shape),
            dg.view(g.shape),
            dbeta.view(beta.shape),
            dA_log,
            None if d_bias is None else d_bias.view(dt_bias.shape),
            d_state,
            None,
        )
