"""Kimi Delta Attention, token by token: the definition that every other implementation is tested against.

Per head, with state S `[K, V]`, decay alpha = exp(g), and q, k (L2-normalised), v, beta of one token (report Eq. 1):

    S    <- Diag(alpha) S                    decay acts on the key channels, before anything reads the state
    u    =  beta (v - S^T k)                 what the state gets wrong about this key
    S    <- S + k u^T
    o    =  scale * S^T q                    read after the write

Autograd differentiates it; float64 inputs stay float64. It is slow on purpose.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from perilune.ops.kda.arguments import Arguments, check, prepare


def recurrent_kda_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: object
) -> tuple[Tensor, Tensor | None]:
    """The token loop with the arguments, defaults and results of `chunk_kda`; float64 inputs are computed in float64.

    Raises:
        ConfigError: as `chunk_kda`.
    """
    args = check(q, k, v, g, beta, **options)
    o, state = recurrent_reference(args)
    return o.to(q.dtype), args.final_state(state)


def recurrent_reference(args: Arguments) -> tuple[Tensor, Tensor]:
    """Run the recurrence over validated arguments.

    Returns `(o [B, T, HV, V], state [N, HV, K, V])` in the compute dtype.
    """
    q, k, v, g, beta = prepare(args)
    group = args.heads // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q * args.scale, k))  # value head i reads qk head i // group
    state = args.state_K_first()
    equal = args.sequences == args.batch  # rows of one length run side by side
    if equal:
        o, state = _recur(q, k, v, g, beta, state)
        return o, state
    outputs, states = [], []
    for n, (begin, end) in enumerate(pairwise(args.offsets)):
        part = (x[:, begin:end] for x in (q, k, v, g, beta))
        o, final = _recur(*part, state[n : n + 1])
        outputs.append(o)
        states.append(final)
    return torch.cat(outputs, dim=1), torch.cat(states)


def _recur(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t].exp().unsqueeze(-1) * state
        predicted = torch.einsum("nhkv,nhk->nhv", state, k[:, t])
        u = beta[:, t].unsqueeze(-1) * (v[:, t] - predicted)
        state = state + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        outputs.append(torch.einsum("nhkv,nhk->nhv", state, q[:, t]))
    return (torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v)), state
