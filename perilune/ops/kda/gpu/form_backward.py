"""The backward pass of a form: laid out at the first one, for cotangents that lie alike; see `forms`."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.ops.kda.cuda import backward as cuda_backward
from perilune.ops.kda.cuda import fold as cuda_fold
from perilune.ops.kda.cuda import scan_backward as cuda_scan_backward
from perilune.ops.kda.gpu.forms import Form, Parts, unit_strides
from perilune.ops.kda.gpu.forward import flat, state_strides
from perilune.ops.kda.gpu.known import ALIGNMENT
from perilune.ops.kda.gpu.plan import keep_if_recorded

NONE = (0, 0, 0, 0)  # strides of a state that is not there


class BackwardForm:
    """The launches of the backward pass.

    Args:
        form: of the forward pass.
        tensors: q, k, v, g, beta and the cotangent of o, as the kernels can read them (`aligned`).
        A_log, dt_bias: of the call.
        d_final: cotangent of the final state; None = zeros.
        wants_state: whether the gradient of the initial state is asked for.
    """

    def __init__(
        self, form: Form, tensors: tuple[Tensor, ...], A_log: Tensor | None, dt_bias: Tensor | None, d_final: Tensor | None,
        wants_state: bool,
    ) -> None:  # fmt: skip
        q, k, v, g, beta, do = (flat(x) for x in tensors)
        s, p = form.setting, form.plan
        heads, key_dim, value_dim = g.shape[1], g.shape[2], v.shape[2]
        inner = (value_dim, key_dim) if s.state_v_first else (key_dim, value_dim)
        self._form, self._group = form, heads // q.shape[1]
        self._state_shape = (len(s.offsets) - 1, heads, *inner) if wants_state else None
        entering = NONE
        if self._state_shape is not None:
            entering = state_strides(torch.empty(self._state_shape, device="meta"), s.state_v_first)
        leaving = NONE if d_final is None else state_strides(d_final, s.state_v_first)
        self._leave = None
        if p.split:
            summary = cuda_scan_backward.laid_out(do, key_dim, p, True, leaving, False, NONE)
            self._leave = summary, cuda_fold.laid_out(do.device, heads, value_dim, key_dim, p, leaving, True)
            leaving = unit_strides(heads, value_dim, key_dim)
        self._scan = cuda_scan_backward.laid_out(do, key_dim, p, False, leaving, p.split, entering)
        self._parallel = cuda_backward.laid_out(
            q, k, v, g, beta, A_log, dt_bias, do, p.chunk_count, scale=s.scale, lower_bound=s.lower_bound,
            beta_scale=s.beta_scale, l2=s.l2_norm, sigmoid=s.beta_sigmoid, bounded=s.bounded,
        )  # fmt: skip
        inside = heads * value_dim * key_dim
        effects = 4 * p.unit_count * inside if p.split else 0
        self._parts = Parts(2 * p.chunk_count * inside, effects, effects)
        self._grouped_shape = (q.shape[0], heads, key_dim)
        self._dA_shape, self._bias_shape = (p.chunk_count, heads), (p.chunk_count, heads * key_dim)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
        buffer: Tensor, do: Tensor, d_final: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Queue the pass: gradients of q, k, v, g, beta, A_log, dt_bias and the initial state, those absent None."""
        form = self._form
        p, device = form.plan, form.device
        keep_if_recorded(p.chunks)
        *x, U, S, M = form.parts.within(buffer)
        between = v.new_empty(self._parts.bytes // 2)
        dS, N, out = self._parts.within(between)
        leaving: Tensor | int | None = d_final
        if self._leave is not None:
            summary, fold = self._leave
            summary(do, *x, p.units, d_final, N, None, None)
            fold(M, N, d_final, p.sequences, out)
            leaving = out
        dv = v.new_empty(v.shape)
        d_state = None
        if self._state_shape is not None:
            d_state = torch.empty(self._state_shape, dtype=torch.float32, device=device)
        self._scan(do, *x, p.units, leaving, d_state, dv, dS)
        if self._group == 1:
            dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
        else:
            dq, dk = (torch.empty(self._grouped_shape, dtype=torch.float32, device=device) for _ in range(2))
        dz, dbeta = g.new_empty(g.shape), beta.new_empty(beta.shape)
        dA = None if A_log is None else A_log.new_empty(self._dA_shape)
        bias = None if dt_bias is None else dt_bias.new_empty(self._bias_shape)
        self._parallel(q, k, v, g, beta, A_log, dt_bias, do, U, S, dv, dS, p.chunks, dq, dk, dz, dbeta, dA, bias)
        if self._group != 1:
            dq, dk = (t.unflatten(1, (-1, self._group)).sum(2).to(q.dtype).view(q.shape) for t in (dq, dk))
        return (
            dq,
            dk,
            dv,
            dz,
            dbeta,
            None if dA is None else dA.sum(0),
            None if bias is None or dt_bias is None else bias.sum(0).view(dt_bias.shape),
            d_state,
        )


def mergeable(x: Tensor) -> Tensor:
    """Itself, or a copy where rows and tokens do not lie at equal distances: what hooks of saved tensors give back may lie anywhere."""
    return x if flat(x).data_ptr() == x.data_ptr() else x.contiguous()


def aligned(x: Tensor) -> Tensor:
    """Itself, or a copy where its rows do not lie as the kernels copy them: 16 bytes at a time, tokens at equal distances."""
    rows = flat(x)
    if rows.data_ptr() == x.data_ptr() and not x.data_ptr() & ALIGNMENT and not any(n % 8 for n in rows.stride()[:2]):
        return x
    return x.clone(memory_format=torch.contiguous_format)
