"""Run the kernels of the backward pass, each stage in CUDA where that kernel takes the call, else in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.ops.kda.cuda import backward as cuda_backward
from perilune.ops.kda.cuda import scan_backward as cuda_scan_backward
from perilune.ops.kda.gpu.fold import fold
from perilune.ops.kda.gpu.forward import Prepared, Setting, state_strides
from perilune.ops.kda.gpu.plan import CHUNK, Plan
from perilune.ops.kda.triton import configs
from perilune.ops.kda.triton.backward import backward_kernel
from perilune.ops.kda.triton.backward_fast import gradients_kernel, pairs_kernel, products_kernel
from perilune.ops.kda.triton.scan_backward import scan_backward_kernel


def backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, do: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    d_final: Tensor | None, x: Prepared, U: Tensor, S: Tensor, M: Tensor | None, p: Plan, s: Setting,
    wants_state: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Flattened inputs. Gradients of q, k, v, g, beta, A_log, dt_bias and the entry state, those absent None."""
    tokens, heads, value_dim = do.shape
    key_dim, qk_heads = q.shape[-1], q.shape[1]
    if (
        cuda_scan_backward.unsuitable(v, key_dim, x.Qd.dtype) is None
        and cuda_scan_backward.unsuitable(do, key_dim) is not None
    ):
        # `prepare` wrote what the CUDA kernel reads, and all that this asks of a cotangent is where its rows lie.
        do = do.clone(memory_format=torch.contiguous_format)
    E, d_state, dS = _scan(do, x, d_final, M, p, s, wants_state)

    grouped = torch.float32 if heads != qk_heads else q.dtype
    dq, dk = (torch.empty(tokens, heads, key_dim, dtype=grouped, device=q.device) for _ in range(2))
    dz = torch.empty(tokens, heads, key_dim, dtype=g.dtype, device=q.device)
    dbeta = torch.empty(tokens, heads, dtype=beta.dtype, device=q.device)
    dA = torch.empty(p.chunk_count, heads, dtype=torch.float32, device=q.device) if A_log is not None else None
    bias = (
        torch.empty(p.chunk_count, heads, key_dim, dtype=torch.float32, device=q.device)
        if dt_bias is not None
        else None
    )
    if p.chunk_count:
        _parallel(q, k, v, g, beta, A_log, dt_bias, do, U, S, E, dS, p, s, dq, dk, dz, dbeta, dA, bias)
    if heads != qk_heads:
        dq, dk = (x.unflatten(1, (qk_heads, -1)).sum(2).to(q.dtype) for x in (dq, dk))
    return (
        dq,
        dk,
        E.to(q.dtype),
        dz,
        dbeta,
        None if dA is None else dA.sum(0).to(A_log.dtype),
        None if bias is None else bias.sum(0).to(dt_bias.dtype),
        d_state,
    )


def _scan(
    do: Tensor, x: Prepared, d_final: Tensor | None, M: Tensor | None, p: Plan, s: Setting, wants_state: bool
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """E, the gradient of the entry state, and dS of every chunk."""
    tokens, heads, value_dim = do.shape
    key_dim = x.Qd.shape[-1]
    E = torch.empty(tokens, heads, value_dim, dtype=x.Qd.dtype, device=do.device)
    dS = torch.empty(p.chunk_count, heads, value_dim, key_dim, dtype=x.Qd.dtype, device=do.device)
    inner = (value_dim, key_dim) if s.state_v_first else (key_dim, value_dim)
    d_state = (
        torch.empty(len(s.offsets) - 1, heads, *inner, dtype=torch.float32, device=do.device) if wants_state else None
    )
    in_cuda = cuda_scan_backward.unsuitable(do, key_dim, E.dtype) is None

    def scan(source: Tensor | None, v_first: bool, split: bool, target: Tensor | None, summary: bool = False) -> None:
        none = (0, 0, 0, 0)
        leaving = none if source is None else state_strides(source, v_first)
        entering = none if target is None else state_strides(target, s.state_v_first)
        if in_cuda:
            kept = (None, None) if summary else (E, dS)
            cuda_scan_backward.run(do, x, p, source, leaving, split, target, entering, *kept)
            return
        width = min(p.width, configs.SUMMARY_BLOCK) if summary else p.width
        scan_backward_kernel[(heads * (value_dim // width), p.unit_count)](
            do, x.Qd, x.Kd, x.Kr, x.P, x.A, x.gamma, x.beta, p.units, source, target, E, dS, *do.stride()[:2], *leaving, *entering,
            heads, K=key_dim, V=value_dim, BV=width, HAS_STATE=source is not None, SPLIT=split,
            FIRST=wants_state and not summary, SUMMARY=summary, **configs.SCAN_BACKWARD[width > 64],
        )  # fmt: skip

    if not p.split:
        scan(d_final, s.state_v_first, False, d_state)
        return E, d_state, dS
    N, leave = (
        torch.empty(p.unit_count, heads, value_dim, key_dim, dtype=torch.float32, device=do.device) for _ in "NL"
    )
    scan(d_final, s.state_v_first, False, N, summary=True)
    strides = (0, 0, 0, 0) if d_final is None else state_strides(d_final, s.state_v_first)
    fold(M, N, d_final, strides, p, leave, reverse=True)
    scan(leave, True, True, d_state)
    return E, d_state, dS


def _parallel(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, do: Tensor,
    U: Tensor, S: Tensor, E: Tensor, dS: Tensor, p: Plan, s: Setting, dq: Tensor, dk: Tensor, dz: Tensor, dbeta: Tensor,
    dA: Tensor | None, bias: Tensor | None,
) -> None:  # fmt: skip
    """Fill dq, dk, dz, dbeta, dA and bias: in CUDA where that kernel takes the call, else in Triton."""
    inputs, forms = (q, k, v, g, beta, A_log, dt_bias, do), {"l2": s.l2_norm, "sigmoid": s.beta_sigmoid}
    if cuda_backward.unsuitable(*inputs, gate=s.gate, bounded=s.bounded, **forms) is None:
        cuda_backward.launch(
            *inputs, U, S, E, dS, p.chunks, dq, dk, dz, dbeta, dA, bias,
            scale=s.scale, lower_bound=s.lower_bound, beta_scale=s.beta_scale, bounded=s.bounded, **forms,
        )  # fmt: skip
        return
    heads, key_dim, value_dim = g.shape[1], g.shape[2], do.shape[2]
    programs = p.chunk_count * heads
    flags = {"L2": s.l2_norm, "GATE": s.gate, "HAS_A": A_log is not None, "HAS_BIAS": dt_bias is not None}
    gate, numbers = (q, k, g, A_log, dt_bias), (s.scale, s.lower_bound, -0.5 * s.lower_bound)
    strides, group = (*q.stride()[:2], *k.stride()[:2], *g.stride()[:2]), heads // q.shape[1]
    if not s.bounded:
        backward_kernel[(programs,)](
            q, k, g, beta, A_log, dt_bias, do, U, S, E, dS, p.chunks, dq, dk, dz, dbeta, dA, bias,
            s.scale, s.lower_bound, s.beta_scale, *strides, *beta.stride(), *do.stride()[:2], heads, group,
            K=key_dim, V=value_dim, **flags, SIGMOID=s.beta_sigmoid, BLOCK_K=min(32, key_dim // 2), **configs.BACKWARD,
        )  # fmt: skip
        return
    slab = min(programs, configs.SLAB)
    pairs = torch.empty(slab, 2, CHUNK, CHUNK, dtype=U.dtype, device=U.device)
    pieces = torch.empty(slab, 7, CHUNK, key_dim, dtype=U.dtype, device=U.device)
    through = torch.empty(programs, key_dim, dtype=torch.float32, device=U.device)
    diagonal = torch.empty(programs, CHUNK, dtype=torch.float32, device=U.device)
    unit = _unit(do, E)
    for base in range(0, programs, slab):
        grid = (min(slab, programs - base),)
        pairs_kernel[grid](
            beta, do, U, E, p.chunks, unit, pairs, diagonal, dbeta,
            base, numbers[2], s.beta_scale, *beta.stride(), *do.stride()[:2], heads,
            V=value_dim, SIGMOID=s.beta_sigmoid, **configs.PAIRS,
        )  # fmt: skip
        products_kernel[grid](
            *gate, do, U, S, E, dS, p.chunks, pairs, pieces, through,
            base, *numbers, *strides, *do.stride()[:2], heads, group, K=key_dim, V=value_dim, **flags, **configs.PRODUCTS,
        )  # fmt: skip
        gradients_kernel[grid](
            *gate, p.chunks, unit, pieces, through, diagonal, dq, dk, dz, dA, bias,
            base, *numbers, *strides, heads, group, K=key_dim, **flags, **configs.GRADIENTS,
        )  # fmt: skip


def _unit(*cotangents: Tensor) -> Tensor:
    """The power of two that brings the largest of these numbers near 1; 1 if that is 0, infinite or NaN. `[]` float32."""
    top = torch.stack([torch.linalg.vector_norm(x, float("inf")).float() for x in cotangents]).amax()
    unit = torch.exp2(-torch.frexp(top).exponent.float().clamp(-120, 120))
    return torch.where((top > 0) & torch.isfinite(top), unit, 1.0)
