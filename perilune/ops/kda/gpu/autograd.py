"""The KDA kernels as one differentiable function: what is kept between the passes."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.kda.arguments import Arguments
from perilune.ops.kda.gpu import known
from perilune.ops.kda.gpu.backward import backward
from perilune.ops.kda.gpu.form_backward import BackwardForm, aligned, mergeable
from perilune.ops.kda.gpu.forms import Form, lay_out
from perilune.ops.kda.gpu.forward import Forward, Prepared, Setting, flat, forward


def kda_gpu(args: Arguments, key: Hashable = None) -> tuple[Tensor, Tensor | None]:
    """Run the kernels. Returns `(o [B, T, HV, V] in q's dtype, final state in the caller's layout or None)`.

    A later call with the same `key` (`known.key_of`) finds how this one was run.
    """
    given = (args.q, args.k, args.v, args.g, args.beta, args.A_log, args.dt_bias, args.initial_state)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    if key is None or not known.is_decided(key):
        form = lay_out(args, keep)
        if key is not None:
            known.remember(key, None if form is None else partial(_run, form))
        if form is not None:
            return _run(form, *given)
    A_log, dt_bias = (None if t is None else t.contiguous() for t in (args.A_log, args.dt_bias))
    inputs = (*given[:5], A_log, dt_bias, args.initial_state)
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


def _run(
    form: Form, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A call of a form."""
    if not form.gate:
        A_log = dt_bias = None
    if form.keep:
        return _FormFunction.apply(q, k, v, g, beta, A_log, dt_bias, state, form)
    o, final, _ = form.forward(q, k, v, g, beta, A_log, dt_bias, state)
    return o, final


class _FormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None,
        dt_bias: Tensor | None, state: Tensor | None, form: Form,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        o, final, buffer = form.forward(q, k, v, g, beta, A_log, dt_bias, state)
        ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, buffer)
        ctx.form = form
        # The cotangent of a final state that nobody used need not be filled with zeros.
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, A_log, dt_bias, buffer = ctx.saved_tensors
        form: Form = ctx.form
        if do is None:
            do = v.new_zeros(form.o_shape)
        tensors, wants_state = (q, k, v, g, beta, do), ctx.needs_input_grad[7]
        with torch.cuda.device_of(q):
            key = _key(tensors, d_final, wants_state)
            found: BackwardForm | None = form.backwards.get(key)
            if found is None:
                tensors = (*(aligned(x) for x in (q, k, v, g)), mergeable(beta), aligned(do))
                key = _key(tensors, d_final, wants_state)
                found = form.backwards.get(key)
            if found is None:
                found = form.backwards[key] = BackwardForm(form, tensors, A_log, dt_bias, d_final, wants_state)
            q, k, v, g, beta, do = tensors
            return *found(q, k, v, g, beta, A_log, dt_bias, buffer, do, d_final), None


def _key(tensors: tuple[Tensor, ...], d_final: Tensor | None, wants_state: bool) -> Hashable:
    q, k, v, g, beta, do = tensors
    return (
        q.stride(), k.stride(), v.stride(), g.stride(), beta.stride(), do.stride(), do.dtype,
        (q.data_ptr() | k.data_ptr() | v.data_ptr() | g.data_ptr() | do.data_ptr()) & known.ALIGNMENT,
        None if d_final is None else d_final.stride(), wants_state,
    )  # fmt: skip
