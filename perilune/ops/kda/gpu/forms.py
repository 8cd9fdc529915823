"""Calls of one form: alike in all but addresses and contents. Laid out once, afterwards only queued.

What Python does for a call whose form is known: find it, allocate, write addresses, queue two to four kernels. A form exists for
calls all of whose stages are CUDA kernels; others go through `forward` and `backward`, which choose stage by stage.

    known.py   forms found again        autograd.py   a form as one differentiable function        form_backward.py
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from perilune.ops.kda.arguments import Arguments
from perilune.ops.kda.cuda import backward as cuda_backward
from perilune.ops.kda.cuda import fold as cuda_fold
from perilune.ops.kda.cuda import prepare as cuda_prepare
from perilune.ops.kda.cuda import scan as cuda_scan
from perilune.ops.kda.cuda import scan_backward as cuda_scan_backward
from perilune.ops.kda.cuda import summary as cuda_summary
from perilune.ops.kda.gpu.forward import Setting, flat, planned, state_strides
from perilune.ops.kda.gpu.known import ALIGNMENT
from perilune.ops.kda.gpu.plan import CHUNK, keep_if_recorded, only_whole_chunks

PLACE = 1024  # bytes between which the parts of a buffer begin


class Parts:
    """How many tensors share one buffer, which is one allocation: where each begins.

    Args:
        bytes: of each.
    """

    def __init__(self, *bytes: int) -> None:
        *self.begins, self.bytes = accumulate((-(-n // PLACE) * PLACE for n in bytes), initial=0)

    def within(self, buffer: Tensor) -> list[int]:
        """The addresses."""
        base = buffer.data_ptr()
        return [base + begin for begin in self.begins]


def unit_strides(heads: int, value_dim: int, key_dim: int) -> tuple[int, int, int, int]:
    """Of `[units, heads, V, K]`, by (unit, head, V, K)."""
    return heads * value_dim * key_dim, value_dim * key_dim, key_dim, 1


class Form:
    """The forward pass of one form, and what the backward pass of it needs to know.

    Args:
        args: a call of the form.
        keep: whether a backward pass will follow.
        flats: its q, k, v, g and beta over flattened tokens, as views.
    """

    def __init__(self, args: Arguments, keep: bool, flats: tuple[Tensor, ...]) -> None:
        q, k, v, g, beta = flats
        s = Setting.of(args, keep)
        heads, key_dim, value_dim = args.heads, args.key_dim, args.value_dim
        p = planned(s, heads, key_dim, value_dim, q.device, True)
        self.setting, self.plan, self.keep, self.gate = s, p, keep, args.gate
        self.device, self.index, self.o_shape = q.device, q.get_device(), args.v.shape
        tiles = p.chunk_count * heads
        wide, square = 2 * tiles * CHUNK * key_dim, 2 * tiles * CHUNK * CHUNK
        kept = (2 * tiles * CHUNK * value_dim, 2 * tiles * value_dim * key_dim) if keep else (0, 0)  # U, S
        effects = 4 * p.unit_count * heads * key_dim if p.split else 0
        self.parts = Parts(
            wide, wide, wide, square, square, 4 * tiles * key_dim, 4 * tiles * CHUNK, *kept, effects * key_dim
        )
        self.entry = Parts(effects * value_dim, effects * value_dim)
        inner = (value_dim, key_dim) if s.state_v_first else (key_dim, value_dim)
        self.final_shape = (args.sequences, heads, *inner) if s.final else None
        final_strides = (0, 0, 0, 0)
        if self.final_shape is not None:
            final_strides = state_strides(torch.empty(self.final_shape, device="meta"), s.state_v_first)
        strides = (0, 0, 0, 0) if args.initial_state is None else state_strides(args.initial_state, s.state_v_first)
        self.backwards: dict[Hashable, Any] = {}  # by how their cotangents lie: `form_backward.BackwardForm`
        self._prepare = cuda_prepare.laid_out(q, k, g, beta, p.chunk_count, s, whole=False, full=p.full)
        self._enter = None
        if p.split:
            summary = cuda_summary.laid_out(v, key_dim, p, strides)
            self._enter = summary, cuda_fold.laid_out(v.device, heads, value_dim, key_dim, p, strides, False)
            strides = unit_strides(heads, value_dim, key_dim)
        self._scan = cuda_scan.laid_out(v, key_dim, p, keep, strides, final_strides)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
        state: Tensor | None, slots: Tensor | None = None, exported: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
        """Queue the pass: o, the final state or None, and the buffer that the kernels share.

        Tensors as given to `chunk_kda`; slots and exported: see `states.Exports`.
        """
        if self.index >= 0 and self.index != torch.cuda.current_device():
            with torch.cuda.device(self.index):
                return self.forward(q, k, v, g, beta, A_log, dt_bias, state, slots, exported)
        p = self.plan
        if p.filling is not None:
            p.filling.wait()
        keep_if_recorded(p.chunks)
        buffer = q.new_empty(self.parts.bytes // 2)
        *x, U, S, M = self.parts.within(buffer)
        self._prepare(q, k, g, beta, A_log, dt_bias, p.chunks, *x)
        enters: Tensor | int | None = state
        between = None  # to be kept until the scan is queued
        if self._enter is not None:
            between = q.new_empty(self.entry.bytes // 2)
            N, enters = self.entry.within(between)
            summary, fold = self._enter
            summary(v, x[1], x[2], x[4], x[5], x[6], p.units, state, M, N)
            fold(M, N, state, p.sequences, enters)
        o, final = q.new_empty(self.o_shape), None
        if self.final_shape is not None:
            final = torch.empty(self.final_shape, dtype=torch.float32, device=self.device)
        self._scan(v, *x, p.units, enters, final, o, U, S, slots, exported)  # without `keep` it writes no U and S
        return o, final, buffer


def lay_out(args: Arguments, keep: bool) -> Form | None:
    """The form of a call, its kernels compiled; None if another way than the CUDA kernels has a part in it."""
    if args.plan is not None or not args.q.numel() or not args.v.numel():
        return None
    given = (args.q, args.k, args.v, args.g, args.beta)
    flats = tuple(flat(x) for x in given)
    if any(x.data_ptr() != y.data_ptr() for x, y in zip(given, flats, strict=True)):  # copied
        return None
    small = [x for x in (args.A_log, args.dt_bias) if x is not None]
    if any(x.dtype != torch.float32 or not x.is_contiguous() for x in small):
        return None
    if args.dt_bias is not None and args.dt_bias.data_ptr() & ALIGNMENT:
        return None
    if args.initial_state is not None and args.initial_state.dtype != torch.float32:
        return None
    q, k, v, g, beta = flats
    s = Setting.of(args, keep)
    if cuda_scan.unsuitable(v, args.key_dim, torch.bfloat16, q.dtype):
        return None
    if cuda_prepare.unsuitable(q, k, g, beta, s, full=only_whole_chunks(args.offsets)):
        return None
    if any(cuda_fold.unsuitable(args.key_dim, args.value_dim, v.device, reverse) for reverse in {False, keep}):
        return None
    if keep:
        forms = {"gate": s.gate, "bounded": s.bounded, "l2": s.l2_norm, "sigmoid": s.beta_sigmoid}
        if cuda_scan_backward.unsuitable(v, args.key_dim, torch.bfloat16) or cuda_backward.unsuitable(
            q, k, v, g, beta, args.A_log, args.dt_bias, v, **forms
        ):
            return None
    return Form(args, keep, flats)
