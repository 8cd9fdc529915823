"""Run the kernels of the forward pass: settings, buffers, launches; each stage in CUDA where that kernel takes the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.ops.kda.arguments import Arguments
from perilune.ops.kda.cuda import prepare as cuda_prepare
from perilune.ops.kda.cuda import scan as cuda_scan
from perilune.ops.kda.cuda import scan_backward as cuda_scan_backward
from perilune.ops.kda.cuda import summary as cuda_summary
from perilune.ops.kda.gpu.fold import fold
from perilune.ops.kda.gpu.plan import CHUNK, Plan, fastest, plan
from perilune.ops.kda.triton import configs
from perilune.ops.kda.triton.prepare import prepare_kernel
from perilune.ops.kda.triton.scan_forward import scan_forward_kernel
from perilune.ops.kda.triton.segments import summary_kernel
from perilune.ops.triton.available import units


@dataclass(frozen=True)
class Setting:
    """What the kernels need besides tensors."""

    scale: float
    l2_norm: bool
    gate: int
    lower_bound: float
    bounded: bool
    beta_sigmoid: bool
    beta_scale: float
    state_v_first: bool
    final: bool
    keep: bool
    offsets: tuple[int, ...]
    plan: Plan | None = None

    @staticmethod
    def of(args: Arguments, keep: bool) -> Setting:
        return Setting(
            scale=args.scale,
            l2_norm=args.l2_norm,
            gate=(1 if args.lower_bound is not None else 2) if args.gate else 0,
            lower_bound=args.lower_bound if args.lower_bound is not None else -5.0,
            bounded=args.bounded,
            beta_sigmoid=args.beta_sigmoid,
            beta_scale=args.beta_scale,
            state_v_first=args.state_v_first,
            final=args.output_final_state,
            keep=keep,
            offsets=args.offsets,
            plan=args.plan,
        )


class Prepared(NamedTuple):
    """Outputs of `prepare`, `[chunks, heads, ...]`: see prepare.py."""

    Qd: Tensor
    Kd: Tensor
    Kr: Tensor
    P: Tensor
    A: Tensor
    gamma: Tensor
    beta: Tensor


def flat(x: Tensor) -> Tensor:
    """`[B, T, H, D]` or `[B, T, H]` as `[B*T, H, ...]`, last dimension contiguous; a view unless strides forbid it."""
    merged = x.flatten(0, 1)
    return merged if merged.dim() == 2 or merged.stride(-1) == 1 else merged.contiguous()


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the tensor cores' operands: bfloat16, whose range the decay factors need; float32 in the interpreter."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def state_strides(state: Tensor, v_first: bool) -> tuple[int, int, int, int]:
    """Strides of a state `[rows, heads, V, K]` or `[rows, heads, K, V]` by (row, head, V, K)."""
    row, head, one, two = state.stride()
    return (row, head, one, two) if v_first else (row, head, two, one)


def prepare(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, p: Plan, s: Setting,
    whole: bool = True,
) -> Prepared:  # fmt: skip
    """The parallel stage on flattened q, k `[tokens, H, K]`, g `[tokens, HV, K]`, beta `[tokens, HV]`.

    The CUDA kernel where it can run, else the Triton one; `ops.kda.cuda.prepare.unsuitable` says why. Unless `whole`, what lies
    above the blocks of 16 on the diagonals of P and A may be anything: the serial CUDA kernels do not read it.
    """
    heads, key_dim = g.shape[1:]
    dtype = operand_dtype(q.dtype)
    shape = (p.chunk_count, heads, CHUNK)
    Qd, Kd, Kr = (torch.empty(*shape, key_dim, dtype=dtype, device=q.device) for _ in range(3))
    P, A = (torch.empty(*shape, CHUNK, dtype=dtype, device=q.device) for _ in range(2))
    gamma = torch.empty(p.chunk_count, heads, key_dim, dtype=torch.float32, device=q.device)
    strength = torch.empty(p.chunk_count, heads, CHUNK, dtype=torch.float32, device=q.device)
    out = Prepared(Qd, Kd, Kr, P, A, gamma, strength)
    if not p.chunk_count:
        return out
    if cuda_prepare.unsuitable(q, k, g, beta, s, p.full) is None:
        cuda_prepare.run(q, k, g, beta, A_log, dt_bias, p.chunks, s, out, whole, p.full)
        return out
    prepare_kernel[(p.chunk_count * heads,)](
        q, k, g, beta, A_log, dt_bias, p.chunks, *out, s.scale, s.lower_bound, -0.5 * s.lower_bound, s.beta_scale,
        *q.stride()[:2], *k.stride()[:2], *g.stride()[:2], *beta.stride(), heads, heads // q.shape[1],
        K=key_dim, L2=s.l2_norm, GATE=s.gate, HAS_A=A_log is not None, HAS_BIAS=dt_bias is not None,
        SIGMOID=s.beta_sigmoid, BOUNDED=s.bounded, **configs.PREPARE,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Entry:
    """The states that enter the units, with their strides by (row, head, V, K)."""

    state: Tensor | None
    strides: tuple[int, int, int, int]
    M: Tensor | None


def enter(v: Tensor, x: Prepared, state: Tensor | None, p: Plan, s: Setting, in_cuda: bool) -> Entry:
    """Find the states at the cuts between segments; without cuts, the caller's entry states."""
    strides = (0, 0, 0, 0) if state is None else state_strides(state, s.state_v_first)
    if not p.split:
        return Entry(state, strides, None)
    heads, value_dim = v.shape[1:]
    key_dim = x.Kd.shape[-1]
    M = torch.empty(p.unit_count, heads, key_dim, key_dim, dtype=torch.float32, device=v.device)
    N, entry = (
        torch.empty(p.unit_count, heads, value_dim, key_dim, dtype=torch.float32, device=v.device) for _ in "NE"
    )
    if in_cuda:
        cuda_summary.run(v, x, p, state, strides, M, N)
    else:
        width = min(configs.SUMMARY_BLOCK, value_dim, key_dim)
        summary_kernel[(heads * (value_dim // width + key_dim // width), p.unit_count)](
            v, x.Kd, x.Kr, x.A, x.gamma, x.beta, p.units, state, M, N, *v.stride()[:2], *strides, heads,
            K=key_dim, V=value_dim, BV=width, HAS_STATE=state is not None, **configs.SUMMARY,
        )  # fmt: skip
    fold(M, N, state, strides, p, entry, reverse=False)
    return Entry(entry, tuple(entry.stride()), M)


class Forward(NamedTuple):
    """What the forward pass found: o `[tokens, HV, V]` and the final state; with `Setting.keep`, also what the backward pass
    needs: U, S and (of segments) M."""

    o: Tensor
    final: Tensor | None
    x: Prepared
    U: Tensor | None
    S: Tensor | None
    M: Tensor | None
    plan: Plan


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    state: Tensor | None, s: Setting, exports: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Forward:  # fmt: skip
    """Flattened inputs; `exports`: see `states.Exports`."""
    state = None if state is None else state.float()  # the kernels read float32; a caller's may be float64
    tokens, heads, value_dim = v.shape
    key_dim = q.shape[-1]
    dtypes = operand_dtype(q.dtype), q.dtype
    in_cuda = cuda_scan.unsuitable(v, key_dim, *dtypes) is None
    in_cuda_both_ways = in_cuda and (not s.keep or cuda_scan_backward.unsuitable(v, key_dim, *dtypes) is None)
    p = planned(s, heads, key_dim, value_dim, v.device, in_cuda)
    x = prepare(q, k, g, beta, A_log, dt_bias, p, s, whole=not in_cuda_both_ways)
    entry = enter(v, x, state, p, s, in_cuda)
    o = torch.empty(tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    final = None
    if s.final:
        inner = (value_dim, key_dim) if s.state_v_first else (key_dim, value_dim)
        final = torch.empty(len(s.offsets) - 1, heads, *inner, dtype=torch.float32, device=q.device)
    U = S = None
    if s.keep:
        U = torch.empty(p.chunk_count, heads, CHUNK, value_dim, dtype=x.Qd.dtype, device=q.device)
        S = torch.empty(p.chunk_count, heads, value_dim, key_dim, dtype=x.Qd.dtype, device=q.device)
    final_strides = (0, 0, 0, 0) if final is None else state_strides(final, s.state_v_first)
    if in_cuda:
        cuda_scan.run(v, x, p, entry.state, entry.strides, final, final_strides, o, U, S, *exports)
    else:
        scan_forward_kernel[(heads * (value_dim // p.width), p.unit_count)](
            v, x.Qd, x.Kd, x.Kr, x.P, x.A, x.gamma, x.beta, p.units, entry.state, final, o, U, S, *exports,
            *v.stride()[:2], *entry.strides, *final_strides, heads, K=key_dim, V=value_dim, BV=p.width,
            HAS_STATE=entry.state is not None, SPLIT=p.split, FINAL=s.final, KEEP=s.keep,
            **(configs.SCAN if exports[0] is None else configs.SCAN_EXPORTS)[p.width > 64],
        )  # fmt: skip
    return Forward(o, final, x, U, S, entry.M, p)


def planned(s: Setting, heads: int, key_dim: int, value_dim: int, device: torch.device, in_cuda: bool) -> Plan:
    """The caller's plan, or for these sequences the fastest by what the kernels were measured to take."""
    if s.plan is not None:
        return s.plan
    return plan(s.offsets, *fastest(s.offsets, heads, value_dim, key_dim, in_cuda, units(device)), device)
