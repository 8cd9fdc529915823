"""Kimi Delta Attention in chunks, in plain torch: forward and a hand-written backward.

Inside a chunk, with G the cumulative log-decay from its start, S the state that enters it, and gamma = exp(G_last):

    Qd = scale q e^G        Kd = k e^G        Kr = k e^(G_last - G)
    U  = A beta (V - Kd S)      A = (I + L)^-1, see `tiles`        what each token writes
    O  = Qd S + P U                                                what each token reads
    S' = gamma S + Kr^T U

The backward walks the chunks in reverse for what is serial (dU, dR, dS) and does the rest chunk-parallel. With dR = A^T dU
the cotangent of L is -tril(dR U^T, -1): neither A nor its derivative is needed there (kernels §2.2, §2.4). The diagonal
of P has decay 1, so it stays out of dG: its two contributions would cancel only up to rounding, and that residue would
dominate the decay gradient of a closed gate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.kda.arguments import Arguments, prepare
from perilune.ops.kda.layout import ChunkLayout
from perilune.ops.kda.tiles import intra_products, pairs, tail_sums, unit_lower_inverse

BLOCK_NUMBERS = 1 << 19  # numbers in one [chunks, HV, C, K] temporary (2 MB in float32): larger ones fall out of cache
CLOSED = -1e4  # exp of it is 0 in every dtype; stands in for g = -inf, whose differences would be NaN


def chunked(args: Arguments, chunk_size: int | None) -> tuple[Tensor, Tensor]:
    """Run the chunked form. Returns `(o [B, T, HV, V], state [N, HV, K, V])` in the compute dtype."""
    if chunk_size is None:
        chunk_size = 64 if args.q.is_cuda else 16  # CPU: no off-diagonal tiles; GPU: a quarter of the serial steps
    layout = ChunkLayout.build(args.offsets, chunk_size, args.q.device)
    q, k, v, g, beta = prepare(args)
    return _Chunked.apply(
        q, k, v, g, beta, args.state_K_first(), args.scale, layout, args.bounded, torch.is_grad_enabled()
    )


@dataclass
class _Chunks:
    """The chunk-parallel quantities of a block of chunks, `[n, HV, C, .]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor
    decay: Tensor  # e^G
    tail: Tensor  # e^(G_last - G)
    gamma: Tensor  # e^G_last, [n, HV, K, 1]
    P: Tensor
    L: Tensor
    A: Tensor

    @property
    def Qd(self) -> Tensor:
        return self.q * self.decay

    @property
    def Kd(self) -> Tensor:
        return self.k * self.decay

    @property
    def Kr(self) -> Tensor:
        return self.k * self.tail


def _build(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: slice, scale: float, bounded: bool
) -> _Chunks:
    group = v.shape[1] // q.shape[1]
    q, k = q[rows] * scale, k[rows]
    if group > 1:
        q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    g, beta = g[rows], beta[rows]
    P, L = intra_products(q, k, beta, g, bounded)
    decay = g.cumsum(-2).exp()
    return _Chunks(
        q=q,
        k=k,
        v=v[rows],
        beta=beta.unsqueeze(-1),
        g=g,
        decay=decay,
        tail=tail_sums(g).exp(),
        gamma=decay[..., -1:, :].transpose(-1, -2),
        P=P,
        L=L,
        A=unit_lower_inverse(L),
    )


def _blocks(layout: ChunkLayout, numbers_per_chunk: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Consecutive steps whose temporaries fit into `BLOCK_NUMBERS`."""
    limit = max(1, BLOCK_NUMBERS // numbers_per_chunk)
    block: list[tuple[int, int]] = []
    for step in layout.steps:
        if block and step[1] - block[0][0] > limit:
            yield tuple(block)
            block = []
        block.append(step)
    if block:
        yield tuple(block)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor,
        scale: float,
        layout: ChunkLayout,
        bounded: bool,
        keep_states: bool,
    ) -> tuple[Tensor, Tensor]:
        batch = q.shape[0]
        q, k, v, g = (layout.gather(x) for x in (q, k, v, g))
        if not bounded:
            g = g.clamp_min_(CLOSED)
        beta = layout.gather(beta.unsqueeze(-1)).squeeze(-1)
        chunks, heads, rows, value_dim = v.shape
        key_dim = q.shape[-1]
        state = initial_state[layout.order]  # a copy; rows that have run out of chunks keep their final state
        entries = state.new_empty(chunks if keep_states else 0, heads, key_dim, value_dim)
        o = torch.empty_like(v)
        for block in _blocks(layout, heads * rows * key_dim):
            base = block[0][0]
            c = _build(q, k, v, g, beta, slice(base, block[-1][1]), scale, bounded)
            Qd, Kd, Kr_T = c.Qd, c.Kd, c.Kr.transpose(-1, -2)
            for begin, end in block:
                active, here = end - begin, slice(begin - base, end - base)
                S = state[:active]
                if keep_states:
                    entries[begin:end] = S
                U = c.A[here] @ (c.beta[here] * (c.v[here] - Kd[here] @ S))
                torch.add(Qd[here] @ S, c.P[here] @ U, out=o[begin:end])
                state[:active] = c.gamma[here] * S + Kr_T[here] @ U
        ctx.save_for_backward(q, k, v, g, beta, entries)
        ctx.scale, ctx.layout, ctx.bounded, ctx.batch = scale, layout, bounded, batch
        return layout.scatter(o, batch), state[layout.rank]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, entries = ctx.saved_tensors
        layout: ChunkLayout = ctx.layout
        group = v.shape[1] // q.shape[1]
        do = layout.gather(do)
        dS = dstate[layout.order]
        dq, dk, dv, dg, dbeta = (torch.empty_like(x) for x in (q, k, v, g, beta))
        blocks = list(_blocks(layout, v.shape[1] * q.shape[2] * q.shape[3]))
        for block in reversed(blocks):
            base, rows = block[0][0], slice(block[0][0], block[-1][1])
            c = _build(q, k, v, g, beta, rows, ctx.scale, ctx.bounded)
            S, dO = entries[rows], do[rows]
            Qd_T, Kd_T, Kr, A_T = c.Qd.transpose(-1, -2), c.Kd.transpose(-1, -2), c.Kr, c.A.transpose(-1, -2)
            R = c.v - c.Kd @ S
            U = c.A @ (c.beta * R)
            PdO = c.P.transpose(-1, -2) @ dO
            dR, dS_out = torch.empty_like(U), torch.empty_like(S)
            for begin, end in reversed(block):
                active, here = end - begin, slice(begin - base, end - base)
                dS_out[here] = dS[:active]
                dU = PdO[here] + Kr[here] @ dS[:active]
                torch.matmul(A_T[here], dU, out=dR[here])
                E = c.beta[here] * dR[here]
                dS[:active] = c.gamma[here] * dS[:active] + Qd_T[here] @ dO[here] - Kd_T[here] @ E
            grads = _parallel_backward(c, S, dS_out, U, R, dR, dO, ctx.bounded)
            dq_block, dk_block, dv[rows], dg[rows], dbeta[rows] = grads
            dq_block *= ctx.scale
            if group > 1:
                dq_block, dk_block = (x.unflatten(1, (-1, group)).sum(2) for x in (dq_block, dk_block))
            dq[rows], dk[rows] = dq_block, dk_block
        dq, dk, dv, dg = (layout.scatter(x, ctx.batch) for x in (dq, dk, dv, dg))
        dbeta = layout.scatter(dbeta.unsqueeze(-1), ctx.batch).squeeze(-1)
        return dq, dk, dv, dg, dbeta, dS[layout.rank], None, None, None, None


def _parallel_backward(
    c: _Chunks, S: Tensor, dS_out: Tensor, U: Tensor, R: Tensor, dR: Tensor, dO: Tensor, bounded: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of (scaled q, k, v, g, beta) of a block of chunks, once the serial pass has left dR and dS_out."""
    U_T = U.transpose(-1, -2)
    dP = dO @ U_T
    dL = (dR @ U_T).neg_()
    E = c.beta * dR
    S_T = S.transpose(-1, -2)
    dQd, dKd, dKr = dO @ S_T, -(E @ S_T), U @ dS_out.transpose(-1, -2)
    dq, dk = c.decay * dQd, c.decay * dKd + c.tail * dKr
    tail_term = c.k * c.tail * dKr
    dG = c.decay * (c.q * dQd + c.k * dKd)
    dG[..., -1, :] += c.gamma.squeeze(-1) * (S * dS_out).sum(-1)

    dbeta = (dR * R).sum(-1)
    for pair in pairs(c.g, bounded):
        q_rows, k_rows = pair.query_rows(c.q) * pair.q_decay, pair.query_rows(c.k) * pair.q_decay
        keys = pair.key_rows(c.k) * pair.k_decay
        dP_block, dL_block = pair.block(dP), pair.block(dL)
        if pair.diagonal:
            dP_block, dL_block = dP_block.tril(-1), dL_block.tril(-1)
        corrections = dL_block * (k_rows @ keys.transpose(-1, -2))
        pair.query_rows(dbeta.unsqueeze(-1)).squeeze(-1).add_(corrections.sum(-1))
        dL_block = dL_block * pair.query_rows(c.beta)
        dq_rows, dk_rows = dP_block @ keys, dL_block @ keys
        dkeys = dP_block.transpose(-1, -2) @ q_rows + dL_block.transpose(-1, -2) @ k_rows
        pair.query_rows(dq).addcmul_(dq_rows, pair.q_decay)
        pair.query_rows(dk).addcmul_(dk_rows, pair.q_decay)
        pair.key_rows(dk).addcmul_(dkeys, pair.k_decay)
        pair.query_rows(dG).add_(q_rows * dq_rows + k_rows * dk_rows)
        pair.key_rows(dG).sub_(keys * dkeys)
    diagonal = dP.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    dq += diagonal * c.k
    dk += diagonal * c.q
    dg = dG.flip(-2).cumsum(-2).flip(-2)
    dg[..., 1:, :] += tail_term.cumsum(-2)[..., :-1, :]  # a row's decay scales what the rows before it write
    return dq, dk, E, dg, dbeta
